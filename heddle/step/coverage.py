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

IntArray = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_REQUEST, _POSITION, _SLOT = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MAX_SLOT = 1 << 40
"""Far above any pool, and so far below 2**64 that no other word reads as a slot by chance."""


def mix(request: IntArray | int, position: IntArray, slot: IntArray) -> int:
    """Sum over rows of a 64-bit finaliser of (request, position, slot), modulo 2**64."""
    with np.errstate(over="ignore"):
        return int(mix_rows(request, position, slot).sum(dtype=np.uint64)) & _MASK


def mix_rows(request: IntArray | int, position: IntArray, slot: IntArray) -> npt.NDArray[np.uint64]:
    """The word of each row.

    Source: the splitmix64 finaliser, applied to a linear combination with odd constants.
    """
    with np.errstate(over="ignore"):
        word: npt.NDArray[np.uint64] = (
            np.asarray(request).astype(np.uint64) * np.uint64(_REQUEST)
            + position.astype(np.uint64) * np.uint64(_POSITION)
            + slot.astype(np.uint64) * np.uint64(_SLOT)
        )
        word = (word ^ (word >> np.uint64(30))) * np.uint64(_FIRST)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(_SECOND)
        word ^= word >> np.uint64(31)
        return word


def describe_stray(difference: int, request: IntArray, position: IntArray, slot: IntArray) -> str:
    """What one wrong write of a rank makes of its sum, in words; empty where no single one does.

    Each step of the finaliser can be undone, so the slot that a row went to can be read off the
    sum, although the sum names none.

    Args:
        difference: the rank's sum less the one that was due, modulo 2**64.
        request, position, slot: of the rows that were due on the rank, `[rows]`.
    """
    with np.errstate(over="ignore"):
        words = mix_rows(request, position, slot)
        found = _slots_of(words + np.uint64(difference), request, position)
    for index in range(len(words)):
        row = f"position {position[index]} of request {request[index]}"
        if int(words[index]) == -difference & _MASK:
            return f"{row} was not written"
        if int(words[index]) == difference:
            return f"{row} was written twice"
        if int(found[index]) < _MAX_SLOT:
            return f"{row} went to slot {found[index]} instead of {slot[index]}"
    return ""


def _slots_of(
    words: npt.NDArray[np.uint64], request: IntArray, position: IntArray
) -> npt.NDArray[np.uint64]:
    """The slots that give these words, `mix_rows` read backwards."""
    word = words ^ (words >> np.uint64(31)) ^ (words >> np.uint64(62))
    word = word * np.uint64(pow(_SECOND, -1, 1 << 64))
    word = word ^ (word >> np.uint64(27)) ^ (word >> np.uint64(54))
    word = word * np.uint64(pow(_FIRST, -1, 1 << 64))
    word = word ^ (word >> np.uint64(30)) ^ (word >> np.uint64(60))
    rest = request.astype(np.uint64) * np.uint64(_REQUEST)
    rest = rest + position.astype(np.uint64) * np.uint64(_POSITION)
    slots: npt.NDArray[np.uint64] = (word - rest) * np.uint64(pow(_SLOT, -1, 1 << 64))
    return slots


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
