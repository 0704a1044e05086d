"""A sum that shows whether every new position was stored exactly once, in its own slot.

Each rank adds a 64-bit mix of (request, position, slot) over the KV rows it writes. Summed modulo
2**64 over the ranks that share a sequence's keys this must equal what the layout says, whatever the
interleave, the chunking or the row classes were.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heddle.step.batch import GlobalBatch
from heddle.step.packed import packed_length, packed_part, unpack_table
from heddle.step.topology import Topology

_MASK = (1 << 64) - 1


def mix(
    request: npt.NDArray[np.int64] | int,
    position: npt.NDArray[np.int64],
    slot: npt.NDArray[np.int64],
) -> int:
    """Sum over rows of a 64-bit finaliser of (request, position, slot), modulo 2**64.

    Source: the splitmix64 finaliser, applied to a linear combination with odd constants.
    """
    with np.errstate(over="ignore"):
        word = (
            np.asarray(request).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            + position.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
            + slot.astype(np.uint64) * np.uint64(0x165667B19E3779F9)
        )
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
        return int(word.sum(dtype=np.uint64)) & _MASK


def expected_coverage(batch: GlobalBatch, topology: Topology) -> tuple[int, ...]:
    """Per cache group: what the writes of one store copy must add up to."""
    return tuple(_of_group(batch, topology, group) for group in range(len(topology.groups)))


def _of_group(batch: GlobalBatch, topology: Topology, group: int) -> int:
    """All requests at once, for a step may hold hundreds of decodes."""
    layout = topology.kv_layout(group)  # where a chain starts has no effect on its slots
    facts = [(len(r.token_ids), r.num_computed_tokens, r.request_id) for r in batch.requests]
    counts, cached, ids = np.array(facts, dtype=np.int64).reshape(-1, 3).T
    if not counts.sum():
        return 0
    hidden = cached // layout.virtual_block_size  # blocks in front of the first new row
    tails = [
        packed_part(request.packed_tables[group], start)
        for request, start in zip(batch.requests, hidden.tolist(), strict=True)
    ]
    tables = unpack_table(b"".join(tails))
    lengths = np.array([packed_length(tail) for tail in tails], dtype=np.int64)
    first_block = np.cumsum(lengths) - lengths - hidden

    def per_row(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.repeat(values, counts)

    ends = np.cumsum(counts)
    positions = np.arange(ends[-1], dtype=np.int64) - per_row(ends - counts) + per_row(cached)
    # Not as the ranks do it: a fault of theirs must not predict itself.
    local = layout.local_index(positions)
    slots = tables[per_row(first_block) + local // layout.block_size] * layout.block_size
    return mix(per_row(ids), positions, slots + local % layout.block_size)
