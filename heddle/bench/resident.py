"""What decode takes where memory is no limit: the stored rows lie in a core's own cache.

The same kernel goes through a long context whose tokens lie over each other in a few blocks, so
that only arithmetic is left. With the time of the same context in memory it tells how far
arithmetic and reading overlap:

    read      a key at the read bandwidth of the same run
    compute   a key out of the cache
    taken     a key out of memory: the longer of the two if all overlaps, their sum if nothing does
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from heddle.bench.limits import Limits
from heddle.bench.paged_case import AttentionShape, CaseSize, Inputs, PagedCase, Seat
from heddle.bench.timing import interleaved_seconds, summary
from heddle.config.engine import KernelChoice

RESIDENT_BYTES = 192 << 10
"""Of the blocks that are met again and again, in one layer: less than the second-level cache of a
core, more than its first.
"""


def measure_resident(
    shape: AttentionShape,
    context: int,
    block_sizes: Sequence[int],
    rounds: int,
    limits: Limits,
    *,
    backend: str,
    kernels: KernelChoice = "auto",
) -> dict[str, Any]:
    """Time one decode row over one layer, out of memory and out of a cache.

    Args:
        shape: heads, not latent.
        context: tokens; enough that a launch is nothing beside them, and that no cache has them.
        block_sizes: of the cases out of memory; the first is that of the one out of a cache.
        rounds: times that each is run.
        limits: timed beside them.
        backend: name.
        kernels: of the rank.
    Returns:
        `{shape, context, limits, compute_bytes_per_second, compute_flops, blocks: [{block_size,
        read_seconds, compute_seconds, taken_seconds, overlap}]}`, see `overlap`.
    Raises:
        UnsupportedError: the layers of this backend cannot be repeated.
    """
    seat = Seat(backend=backend, kernels=kernels)
    memory = {size: CaseSize(context=context, block_size=size) for size in block_sizes}
    inputs = Inputs.random(shape, memory[block_sizes[0]])
    cases = {size: PagedCase(shape, found, inputs, seat) for size, found in memory.items()}
    first = cases[block_sizes[0]]
    block_bytes = block_sizes[0] * shape.num_kv_heads * first.row_bytes
    own = max(1, RESIDENT_BYTES // block_bytes)
    few = CaseSize(context=context, block_size=block_sizes[0], num_own_blocks=own)
    compute = PagedCase(shape, few, inputs, seat)
    calls = {**limits.calls, "compute": compute.recorded()}
    calls |= {str(size): case.recorded() for size, case in cases.items()}
    times = interleaved_seconds(calls, rounds)
    seconds = {name: summary(found)["median_seconds"] for name, found in times.items()}
    rates = limits.rates({name: seconds[name] for name in limits.calls})
    read = first.kv_bytes / rates["read_bytes_per_second"]
    return {
        "shape": shape.name,
        "context": context,
        "limits": rates,
        "compute_bytes_per_second": first.kv_bytes / seconds["compute"],
        "compute_flops": first.flops / seconds["compute"],
        "blocks": [
            {"block_size": size, **_overlap(read, seconds["compute"], seconds[str(size)])._asdict()}
            for size in block_sizes
        ],
    }


class Overlap(NamedTuple):
    """Seconds of one pass, and how much of the shorter of its two parts hides under the other."""

    read_seconds: float
    compute_seconds: float
    taken_seconds: float
    overlap: float
    """1: all of it; 0: nothing, as if one followed the other."""


def _overlap(read: float, compute: float, taken: float) -> Overlap:
    return Overlap(read, compute, taken, (read + compute - taken) / min(read, compute))
