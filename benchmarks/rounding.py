"""W10: does sharding the context add rounding error, where numbers are narrow?

    python benchmarks/rounding.py [--quick] [--save]

N ranks keep a share of every sequence each and merge their partial results through the log-sum-exp.
Their error against float64 is to be at most twice that of one rank, for N = 2..32, whatever brings
partials back. Errors are root mean squares over all outputs; inputs are rounded to the narrow type
before the float64 result is computed, so only what attention itself adds is seen.

Ranks are threads: this is about numbers, not time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from support import Report, parser, say

from heddle.bench.paged_case import AttentionShape, CaseSize, Inputs, PagedCase, Seat
from heddle.comm.base import World
from heddle.comm.threads import ThreadGroup
from heddle.config import ParallelConfig

SHAPE = AttentionShape(num_query_heads=8, num_kv_heads=2, head_dim=64)
TYPES = (("bfloat16", "auto"), ("float32", "bfloat16"))
"""(of computation and wire, of the cache)."""
RETURNS = ("ag_rs", "ag_ar", "a2a")


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("rounding", "Rounding of merges")
    size = CaseSize(context=515 if arguments.quick else 4099, num_streams=4)
    sizes = (2, 4) if arguments.quick else (2, 4, 8, 16, 32)
    rows: list[list[Any]] = []
    metrics: dict[str, Any] = {}
    for dtype, kv_cache_dtype in TYPES:
        case = dataclasses.replace(size, kv_cache_dtype=kv_cache_dtype)
        inputs = rounded_inputs(Inputs.random(SHAPE, case))
        golden = dense(inputs, case)
        label = f"{dtype}, cache {kv_cache_dtype}"
        alone = rms(run(1, "auto", dtype, case, inputs) - golden)
        rows.append([label, 1, "-", alone, 1.0])
        for num_ranks in sizes:
            for returns in RETURNS:
                say(f"{label}: {num_ranks} ranks, {returns}")
                error = rms(run(num_ranks, returns, dtype, case, inputs) - golden)
                rows.append([label, num_ranks, returns, error, error / alone])
                metrics[f"{dtype} {kv_cache_dtype} {num_ranks} {returns}"] = error / alone
                what = f"{label}, {num_ranks} ranks, {returns}: error over one rank's"
                report.target("W10", what, error / alone, at_most=2.0)
    columns = ["types", "ranks", "return", "rms error", "over one rank"]
    report.table(
        "error of decode attention", columns, [[*row[:3], *map(exact, row[3:])] for row in rows]
    )
    return report.finish(arguments, metrics)


def exact(value: float) -> str:
    return f"{value:.3g}"


def rounded_inputs(inputs: Inputs) -> Inputs:
    """Numbers that bfloat16 holds."""
    return Inputs(*(numbers.bfloat16().float() for numbers in (inputs.rows, inputs.query)))


def dense(inputs: Inputs, size: CaseSize) -> torch.Tensor:
    """`[B, H, D]` in float64."""
    group = SHAPE.num_query_heads // SHAPE.num_kv_heads
    rows = inputs.rows.double().repeat_interleave(group, dim=2)  # [B, S, H, 2D]
    key, value = rows.chunk(2, dim=-1)
    query = inputs.query.double().view(size.num_streams, SHAPE.num_query_heads, -1)
    scores = torch.einsum("bhd,bshd->bhs", query, key) * SHAPE.head_dim**-0.5
    return torch.einsum("bhs,bshd->bhd", torch.softmax(scores, dim=-1), value)


def run(num_ranks: int, returns: Any, dtype: str, size: CaseSize, inputs: Inputs) -> torch.Tensor:
    """`[B, H, D]` of a layout, in float64."""
    parallel = ParallelConfig(
        prefill_context_parallel_size=num_ranks,
        decode_context_parallel_size=num_ranks,
        dcp_comm_backend=returns,
        decode_row_sharding="copy",
    )

    def rank(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        seat = Seat(dtype=dtype, parallel=parallel, world=world)
        case = PagedCase(SHAPE, size, inputs, seat)
        return case.rows, case.run()

    found = torch.empty(size.num_streams, SHAPE.num_query_heads, SHAPE.head_dim).double()
    for rows, out in ThreadGroup(num_ranks).run(rank):
        found[rows[rows >= 0]] = out[rows >= 0].double()
    return found


def rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


if __name__ == "__main__":
    raise SystemExit(main())
