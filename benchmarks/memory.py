"""W11: the memory of a rank is what `heddle doctor MODEL` prints, and does not grow in decoding.

    python benchmarks/memory.py [--quick] [--save] [--layout NAME]

    said      the sheet of the doctor, a process of its own: interpreter and libraries, weights,
              pools, shared boxes, rows of the largest step
    found     peak resident size of the rank's process, its pool filled by a long prompt

The peak is to be within 15% of what was said. Then tokens are decoded into blocks that have been
used before: resident size before and after is compared, step for step the same work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from support import Report, parser, say

from heddle.bench.contest import HeddleEngine, bench_config, text_prompts
from heddle.config.engine import EngineConfig
from heddle.engine.args import engine_config
from heddle.engine.driver import Driver
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.machine import resolve_here
from heddle.engine.tokenizer import load_tokenizer
from heddle.kernels.warmup import compile_elsewhere, operations

LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "2 ranks, PCP DCP": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "2 ranks, TP": {"tensor_parallel_size": 2},
}
POOL_BYTES = 200 << 20
MIB = 1 << 20
PARTS = ("process", "weights", "kv_pool", "states", "exchange", "activations", "total")
WARM_STEPS = 320
"""Until what keeps the latest 256 steps is full."""


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--layout", choices=LAYOUTS, help="this one alone")
    arguments = flags.parse_args()
    report = Report("memory", "Memory of a rank")
    metrics: dict[str, Any] = {}
    rows: list[list[Any]] = []
    chosen = [arguments.layout] if arguments.layout else list(LAYOUTS)
    for name in chosen:
        say(name)
        settings = LAYOUTS[name]
        config = bench_config(
            engine_config(
                "demo", executor="processes", kv_cache_memory_bytes=POOL_BYTES, **settings
            ),
            num_streams=1,
        )
        sheets = said(settings)
        found = {"said": sheets, **measure(config, is_quick=arguments.quick)}
        metrics[name] = found
        for rank, sheet in sheets.items():
            peak, total = found["peak_bytes"][rank], sheet["total_bytes"]
            parts = [sheet[f"{part}_bytes"] // MIB for part in PARTS]
            rows.append([name, rank, *parts, peak // MIB, peak / total])
            what = f"{name}, rank {rank}: peak over what was said"
            report.target("W11", what, peak / total, at_least=0.85, at_most=1.15)
        growth = max(found["growth_bytes"].values()) / MIB
        what = f"{name}: MiB grown over {found['num_steps']} decode steps"
        report.target("W11", what, growth, at_most=1.0)
    parts = ["process", "weights", "KV pool", "states", "exchange", "step", "in all"]
    columns = ["layout", "rank", *parts, "peak", "peak / in all"]
    report.table("what is said of a rank, and its peak; MiB", columns, rows)
    return report.finish(arguments, metrics)


def measure(config: EngineConfig, *, is_quick: bool) -> dict[str, Any]:
    """The peak and the growth of every rank."""
    resolved = resolve_here(config)
    # As an engine does at its start: a rank that compiles keeps the compiler's memory.
    compile_elsewhere(operations(resolved.kernels, resolved.backend, resolved.kv_cache_dtype), say)
    with ProcessesExecutor(resolved) as executor:
        pids, plan = executor.pids, resolved
        tokenizer = load_tokenizer(plan.model_path)
        engine = HeddleEngine(Driver(plan, executor, tokenizer))
        tokens = plan.num_blocks * plan.cache.block_size
        tokens *= plan.parallel.decode_context_parallel_size
        longest = min(tokens, plan.scheduler.max_model_len) - 64
        length = 256 if is_quick else longest
        vocab_size = plan.model.vocab_size
        (prompt,) = text_prompts(tokenizer, vocab_size, length, 1)
        engine.run([prompt], 4)
        peak = dict(enumerate(map(peak_bytes, pids)))
        num_steps = 16 if is_quick else 2000
        engine.run([prompt[:64]], 16 if is_quick else WARM_STEPS)
        before = [psutil.Process(pid).memory_info().rss for pid in pids]
        engine.run([prompt[:64]], num_steps)
        after = [psutil.Process(pid).memory_info().rss for pid in pids]
    growth = {rank: a - b for rank, (a, b) in enumerate(zip(after, before, strict=True))}
    return {
        "peak_bytes": peak,
        "growth_bytes": growth,
        "num_steps": num_steps,
        "prompt_len": length,
    }


def said(settings: dict[str, Any]) -> dict[int, dict[str, int]]:
    """What the doctor prints for every rank, in bytes."""
    flags = {"executor": "processes", "max_num_seqs": 1, "kv_cache_memory_bytes": POOL_BYTES}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (flags | settings).items()]
    command = [sys.executable, "-m", "heddle", "doctor", "demo", "--json", *words]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    memory = json.loads(printed.stdout)["model"]["memory"]
    return dict(sorted((rank, row) for row in memory for rank in row["ranks"]))


def peak_bytes(pid: int) -> int:
    """Largest resident size that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    raise SystemExit(main())
