"""W11 and the planner's promise: what `heddle plan` foretells, beside what happens.

    python benchmarks/honest.py memory [--quick] [--save]
    python benchmarks/honest.py time   [--quick] [--save] [--sheet FILE]

    memory    peak resident size of every rank's process, its pool filled by a long prompt, beside
              the sheet of the planner; room in tokens beside that of the engine
    time      the machine is calibrated as by `heddle doctor --calibrate`, or FILE is taken; then
              first tokens and gaps of the demo model over layouts of up to two ranks

Gaps are of decode steps. The first token of the last of several prompts comes beside the decode
rows of the others. An error is |predicted / measured - 1|. Two layouts are in the right order where
the one that is predicted to be quicker is; a pair counts where the measured ratio is above what
two measurements of one thing differ by.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations, pairwise
from statistics import median
from typing import Any

import numpy as np
from memory import peak_bytes
from support import Report, parser, say

from heddle.bench.contest import HeddleEngine, bench_config, text_prompts
from heddle.config import CacheConfig, ParallelConfig, SchedulerConfig
from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.capacity import Capacity
from heddle.engine.driver import Driver
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.inputs import PromptInput
from heddle.engine.machine import resolve_here
from heddle.engine.tokenizer import load_tokenizer
from heddle.kernels.warmup import compile_elsewhere, operations
from heddle.planner.batches import Rows
from heddle.planner.calibrate import sheet_of
from heddle.planner.cost import CostModel
from heddle.planner.devices import Sheet, load_sheet
from heddle.planner.memory import PlannedEngine, plan_engine
from heddle.planner.settings import Settings
from heddle.planner.workload import Workload, predict

MIB = 1 << 20
POOL_BYTES = 200 * MIB
NUM_CORES = len(os.sched_getaffinity(0))
CHUNK, NUM_SEQS = 512, 4
LEAST_NOISE = 0.03
Sizes = dict[str, int]
ONE: Sizes = {}
TENSOR: Sizes = {"tensor_parallel_size": 2}
ROWS: Sizes = {"prefill_context_parallel_size": 2}
KEYS: Sizes = {"decode_context_parallel_size": 2}
LAYOUTS: dict[str, Sizes] = {
    "1 rank": ONE,
    "tp 2": TENSOR,
    "pcp 2": ROWS,
    "pcp 2 dcp 2": {**ROWS, **KEYS},
    "tp 2 dcp 2": {**TENSOR, **KEYS},
}
FOUR: Sizes = {**TENSOR, **ROWS, "decode_context_parallel_size": 4}


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("what", nargs="?", choices=("memory", "time"), help="both unless given")
    flags.add_argument("--sheet", help="of this machine, in place of a calibration")
    arguments = flags.parse_args()
    parts = {"memory": memory, "time": times}
    chosen = [arguments.what] if arguments.what else list(parts)
    return max(parts[name](arguments) for name in chosen)


def planned(sizes: Sizes, sheet: Sheet, pool_bytes: int | None = None) -> PlannedEngine:
    """The demo model as the planner has it, with an engine's default chunk."""
    plan = resolve_here(engine_config("demo"))
    settings = Settings(
        model=plan.model,
        model_name="demo",
        model_path=plan.model_path,
        sheet=sheet,
        num_devices=max(NUM_CORES, ParallelConfig(**sizes).world_size),
        dtype="float32",
        cache=CacheConfig(kv_cache_memory_bytes=pool_bytes),
        scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=NUM_SEQS),
    )
    return plan_engine(settings, ParallelConfig(**sizes))


def driver_of(
    sizes: Sizes, stack: ExitStack, engine: PlannedEngine
) -> tuple[Driver, tuple[int, ...]]:
    """The same layout over processes, choosing exchanges by the same prices; and their ids."""
    config = bench_config(
        engine_config(
            "demo",
            executor="processes",
            kv_cache_memory_bytes=engine.resolved.cache.kv_cache_memory_bytes,
            max_num_batched_tokens=CHUNK,
            **sizes,
        ),
        num_streams=NUM_SEQS,
    )
    config = dataclasses.replace(config, link_costs=engine.resolved.link_costs)
    resolved = resolve_here(config)
    compile_elsewhere(operations(resolved.kernels, resolved.backend, resolved.kv_cache_dtype), say)
    executor = stack.enter_context(ProcessesExecutor(resolved))
    return Driver(resolved, executor, load_tokenizer(resolved.model_path)), tuple(executor.pids)


def prompts_of(driver: Driver, length: int, count: int) -> list[list[int]]:
    """English text."""
    plan = driver.resolved
    tokenizer = load_tokenizer(plan.model_path)
    return text_prompts(tokenizer, plan.model.vocab_size, length, count)


def memory(arguments: argparse.Namespace) -> int:
    """Peaks of ranks, and room."""
    report = Report("honest_memory", "Memory as planned, and as found")
    layouts = {"1 rank": ONE} if arguments.quick else {**LAYOUTS, "tp 2 pcp 2 dcp 4": FOUR}
    rows, metrics = [], {}
    for name, sizes in layouts.items():
        say(name)
        engine = planned(sizes, load_sheet("CPU"), POOL_BYTES)
        sheet = engine.memory
        with ExitStack() as stack:
            driver, pids = driver_of(sizes, stack, engine)
            room = Capacity.of(driver.resolved)
            longest = min(room.longest_prompt, room.kv_tokens_total - 64)
            length = 256 if arguments.quick else longest
            # One window does not fill what several ranks share.
            count = 1 if arguments.quick else max(1, room.kv_tokens_total // (length + 4))
            HeddleEngine(driver).run(prompts_of(driver, length, count), 4)
            peaks = list(map(peak_bytes, pids))
        ratios = [peak / sheet.resident for peak in peaks]
        metrics[name] = {"resident_bytes": sheet.resident, "peak_bytes": peaks}
        parts = (sheet.reserve, sheet.weights, sheet.kv_pool, sheet.mapped_exchange)
        foretold = [part // MIB for part in (*parts, sheet.activations, sheet.resident)]
        rows.append([name, *foretold, max(peaks) // MIB, max(ratios)])
        for rank, ratio in enumerate(ratios):
            what = f"{name}, rank {rank}: peak over what was planned"
            report.target("W11", what, ratio, at_least=1 / 1.15, at_most=1.15)
        mine = (engine.room.tokens_total, engine.room.longest_prompt, engine.room.prefix_unit)
        theirs = (room.kv_tokens_total, room.longest_prompt, room.prefix_unit)
        metrics[name]["room"] = {"planned": mine, "engine": theirs}
        report.target("room", f"{name}: room is the engine's", float(mine == theirs), at_least=1.0)
    columns = ["layout", "process", "weights", "KV pool", "exchange", "step", "in all"]
    report.table("planned, and the largest peak; MiB", [*columns, "peak", "peak / in all"], rows)
    return report.finish(arguments, metrics)


def times(arguments: argparse.Namespace) -> int:
    """First tokens and gaps."""
    report = Report("honest_time", "Times as planned, and as measured")
    sheet = load_sheet(arguments.sheet) if arguments.sheet else calibrated()
    names = ("1 rank", "tp 2") if arguments.quick else tuple(LAYOUTS)
    lengths = (64, 128) if arguments.quick else (128, 512, 2048, 4096)
    points: list[dict[str, Any]] = []
    noise = [LEAST_NOISE]
    for name in names:
        say(name)
        points += measure_layout(name, sheet, lengths, noise)
    apart = 1 + float(np.percentile(noise, 90))
    columns = ["layout", "prompt", "requests", "what", "measured ms", "planned ms", "error"]
    fields = ("layout", "prompt", "requests", "what", "measured", "planned")
    rows = [
        [*(p[f] if i < 4 else 1e3 * p[f] for i, f in enumerate(fields)), error_of(p)]
        for p in points
    ]
    report.table("first tokens and gaps", columns, rows)
    errors = [abs(error_of(point)) for point in points]
    report.target("honest", "median error", median(errors), at_most=0.15)
    p90 = float(np.percentile(errors, 90))
    report.target("honest", "90th percentile of errors", p90, at_most=0.30)
    right, counted = order(points, apart)
    share = right / counted if counted else None
    what = f"pairs in order, of {counted} that differ by more than {apart - 1:.0%}"
    report.target("honest", what, share, at_least=0.9)
    metrics = {"points": points, "noise": noise, "median": median(errors), "p90": p90}
    return report.finish(arguments, {**metrics, "pairs": counted, "in_order": right})


def calibrated() -> Sheet:
    """The sheet that `heddle doctor --calibrate` would write."""
    from heddle.cli.checkup import examine
    from heddle.cli.checkup_steps import measure_steps

    say("calibrating")
    return sheet_of({**examine(), "steps": measure_steps()})


def measure_layout(
    name: str, sheet: Sheet, lengths: Sequence[int], noise: list[float]
) -> list[dict[str, Any]]:
    """All points of a layout; adds to the noise what two measurements differ by."""
    engine, found = planned(LAYOUTS[name], sheet, POOL_BYTES * 8), []
    model, num_tokens = CostModel(engine), 16
    with ExitStack() as stack:
        driver, _ = driver_of(LAYOUTS[name], stack, engine)
        HeddleEngine(driver).run(prompts_of(driver, 64, NUM_SEQS), 8)  # all that compiles
        for length in lengths:
            prompts = prompts_of(driver, length, NUM_SEQS)
            repeats = 2 if length <= CHUNK else 1
            runs = [measure_run(driver, prompts, num_tokens) for _ in range(repeats)]
            for requests, values in runs[0].items():
                again = runs[-1][requests]
                if repeats > 1:
                    noise += [abs(b / a - 1) for a, b in zip(values, again, strict=True)]
                means = [(a + b) / 2 for a, b in zip(values, again, strict=True)]
                base = {"layout": name, "prompt": length, "requests": requests}
                load = Workload(prompt_len=length, output_len=num_tokens, concurrency=requests)
                decodes = [Rows(length + num_tokens // 2, 1)] * requests
                foretold = predict(engine, load, model).ttft, model.step(decodes).seconds
                for what, measured, value in zip(("first", "gap"), means, foretold, strict=True):
                    found.append({**base, "what": what, "measured": measured, "planned": value})
    return found


def measure_run(
    driver: Driver, prompts: Sequence[Sequence[int]], num_tokens: int
) -> dict[int, tuple[float, float]]:
    """By requests at once (one, and all): seconds to the first token of the last of them, and the
    median gap of the decode steps that follow.
    """
    last = len(prompts)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=driver.resolved.scheduler.max_model_len - len(prompts[0]) - 1,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    found, ids = {}, []
    for count, prompt in enumerate(prompts, start=1):
        started = time.perf_counter()
        request = driver.add(PromptInput(token_ids=tuple(prompt)), params)
        ids.append(request)
        while all(output.request_id != request for output in driver.step()):
            pass
        first = time.perf_counter() - started
        if count in (1, last):
            marks = [time.perf_counter()]
            for _ in range(num_tokens):
                driver.step()
                marks.append(time.perf_counter())
            found[count] = (first, median(b - a for a, b in pairwise(marks)))
    for request in ids:
        driver.abort(request)
    while driver.has_work:
        driver.step()
    return found


def error_of(point: dict[str, Any]) -> float:
    """Above 0: planned too slow."""
    return float(point["planned"] / point["measured"] - 1)


def order(points: Sequence[dict[str, Any]], apart: float) -> tuple[int, int]:
    """(pairs in the right order, pairs that are apart) of layouts that did the same."""
    right = counted = 0
    for one, other in combinations(points, 2):
        alike = all(one[key] == other[key] for key in ("prompt", "requests", "what"))
        ratio = one["measured"] / other["measured"]
        if alike and max(ratio, 1 / ratio) > apart:
            counted += 1
            right += (one["planned"] < other["planned"]) == (ratio < 1)
    return right, counted


if __name__ == "__main__":
    raise SystemExit(main())
