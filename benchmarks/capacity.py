"""W7: tokens that fit in a fixed budget of bytes on each rank, DCP N against replicated rows.

    python benchmarks/capacity.py [--save]

Sharding the stored context over N ranks is to hold N times the tokens. What is lost is at most the
unfilled part of a sequence's last block: less than one block on each of its ranks, on average.
Nothing is timed: it is the accounting that engines run with.
"""

from __future__ import annotations

from typing import Any

from support import Report, parser

from heddle.config.engine import ResolvedConfig
from heddle.engine.args import engine_config
from heddle.engine.replica import Replica
from heddle.layout.resolve import resolve
from heddle.models.config_json import load_model_config
from heddle.models.sources import resolve_model_path
from heddle.step.topology import Topology

BUDGET_BYTES = 1 << 28
DEGREES = (2, 3, 4, 8, 16, 64)
LENGTHS = (1, 1000, 8191)
"""Of sequences whose last blocks are counted."""


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("capacity", "Tokens in a fixed budget")
    path = resolve_model_path("demo")
    model = load_model_config(path)

    def resolved(dcp_size: int) -> ResolvedConfig:
        config = engine_config(
            "demo",
            prefill_context_parallel_size=dcp_size,
            decode_context_parallel_size=dcp_size,
            kv_cache_memory_bytes=BUDGET_BYTES,
            executor="threads" if dcp_size > 1 else "inline",
        )
        return resolve(config, model, free_memory_bytes=1 << 40, num_cores=2, model_path=str(path))

    one = tokens_of(resolved(1))
    rows: list[list[Any]] = [[1, one, 1.0, 0]]
    metrics: dict[str, Any] = {"budget_bytes": BUDGET_BYTES, "tokens": {1: one}}
    for degree in DEGREES:
        found = resolved(degree)
        tokens, waste = tokens_of(found), most_unfilled(found)
        rows.append([degree, tokens, tokens / one, waste])
        metrics["tokens"][degree] = tokens
        report.target("W7", f"DCP {degree}: times the tokens", tokens / one, at_least=degree)
        block = found.cache.block_size
        most = block - 1 / degree
        report.target("W7", f"DCP {degree}: unfilled rows a rank", waste, at_most=most)
    report.table(
        f"{BUDGET_BYTES >> 20} MiB a rank",
        ["DCP", "tokens", "times one rank", "unfilled rows of a sequence, a rank"],
        rows,
    )
    return report.finish(arguments, metrics)


def tokens_of(resolved: ResolvedConfig) -> int:
    """Tokens that the blocks hold which sequences may have."""
    replica = Replica(0, resolved, Topology.from_resolved(resolved))
    unit = resolved.cache.block_size * resolved.parallel.decode_context_parallel_size
    return replica.cache.num_usable_blocks * unit


def most_unfilled(resolved: ResolvedConfig) -> float:
    """Most rows that are reserved for a sequence and hold nothing, on average over its ranks."""
    topology = Topology.from_resolved(resolved)
    layout, block = topology.kv_layout(), resolved.cache.block_size
    return max(
        layout.num_virtual_blocks(length) * block - length / layout.world_size for length in LENGTHS
    )


if __name__ == "__main__":
    raise SystemExit(main())
