"""A sum that shows whether every new position was stored exactly once, in its own slot.

Each rank adds a 64-bit mix of (request, position, slot) over the KV rows it writes. Summed over a
DCP group modulo 2**64 this must equal what the layout says, whatever the interleave, the chunking
or the row classes were.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heddle.step.batch import GlobalBatch
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


def expected_coverage(batch: GlobalBatch, topology: Topology) -> int:
    """What the writes of one store copy must add up to."""
    total = 0
    for request in batch.requests:
        layout = topology.kv_layout(request.start_rank)
        first = request.num_computed_tokens
        positions = np.arange(first, first + len(request.token_ids), dtype=np.int64)
        table = np.asarray(request.block_table, dtype=np.int64)
        # Not `layout.slots`, which the ranks ask: a fault in it must not predict itself.
        local = layout.local_index(positions)
        slots = table[local // layout.block_size] * layout.block_size + local % layout.block_size
        total += mix(request.request_id, positions, slots)
    return total & _MASK
