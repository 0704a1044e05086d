"""W11: the memory of a rank is what the accounting says, and does not grow while it decodes.

    python benchmarks/memory.py [--quick] [--save]

    said      base of a process that loads nothing + weights + KV pool      (`heddle doctor MODEL`)
    found     peak resident size of the rank's process, its pool filled by a long prompt

The peak is to be within 15% of what was said. Then tokens are decoded into blocks that have been
used before: resident size before and after is compared, step for step the same work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
from support import Report, parser, say

from heddle.bench.contest import HeddleEngine, bench_config, text_prompts
from heddle.bench.exchange_rank import WORKER
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.engine.args import engine_config
from heddle.engine.driver import Driver
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.machine import resolve_here
from heddle.engine.tokenizer import load_tokenizer
from heddle.models.weights.open import open_weights
from heddle.runner.weigh import distinct_ranks, weigh_rank

LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "2 ranks, PCP DCP": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "2 ranks, TP": {"tensor_parallel_size": 2},
}
POOL_BYTES = 200 << 20
MIB = 1 << 20


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("memory", "Memory of a rank")
    metrics: dict[str, Any] = {}
    rows: list[list[Any]] = []
    for name, settings in LAYOUTS.items():
        say(name)
        config = bench_config(
            engine_config(
                "demo", executor="processes", kv_cache_memory_bytes=POOL_BYTES, **settings
            ),
            num_streams=1,
        )
        found = measure(config, is_quick=arguments.quick)
        metrics[name] = found
        for rank, said in found["said_bytes"].items():
            peak = found["peak_bytes"][rank]
            rows.append([name, rank, said // MIB, peak // MIB, peak / said])
            what = f"{name}, rank {rank}: peak over what was said"
            report.target("W11", what, peak / said, at_least=0.85, at_most=1.15)
        growth = max(found["growth_bytes"].values()) / MIB
        what = f"{name}: MiB grown over {found['num_steps']} decode steps"
        report.target("W11", what, growth, at_most=1.0)
    columns = ["layout", "rank", "said, MiB", "peak, MiB", "peak / said"]
    report.table("resident size of a rank", columns, rows)
    return report.finish(arguments, metrics)


def measure(config: EngineConfig, *, is_quick: bool) -> dict[str, Any]:
    """What was said, the peak, and the growth of every rank."""
    resolved = resolve_here(config)
    said = said_bytes(resolved)
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
        engine.run([prompt[:64]], 16)
        before = [psutil.Process(pid).memory_info().rss for pid in pids]
        engine.run([prompt[:64]], num_steps)
        after = [psutil.Process(pid).memory_info().rss for pid in pids]
    growth = {rank: a - b for rank, (a, b) in enumerate(zip(after, before, strict=True))}
    return {
        "said_bytes": said,
        "peak_bytes": peak,
        "growth_bytes": growth,
        "num_steps": num_steps,
        "prompt_len": length,
    }


def said_bytes(resolved: ResolvedConfig) -> dict[int, int]:
    """Base, weights and pools of each rank."""
    base = base_bytes(resolved)
    source = open_weights(resolved.model_path)
    found = {}
    for first, ranks in distinct_ranks(resolved).items():
        parts = weigh_rank(resolved, first, source)
        found |= dict.fromkeys(ranks, base + parts.weights + parts.cache + parts.states)
    return dict(sorted(found.items()))


def base_bytes(resolved: ResolvedConfig) -> int:
    """Resident size of a rank that has formed its groups and loaded nothing."""
    with ProcessesExecutor(resolved, worker=WORKER) as executor:
        return max(peak_bytes(pid) for pid in executor.pids)


def peak_bytes(pid: int) -> int:
    """Largest resident size that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    raise SystemExit(main())
