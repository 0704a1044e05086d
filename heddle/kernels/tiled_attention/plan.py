"""How the work is cut: blocks of query rows, and pieces of the keys that they meet.

A block is so many rows of one sequence that their lanes of one kv head fill several panels. Where
blocks are few, as in decode, their keys are cut in pieces as well, whose states merge in ascending
order. Cuts depend on shapes and ranges alone, so neither the number of threads nor the order in
which they find work changes a result.

    rows  0 .......... 63 | 64 ......... 127        a sequence of 128 rows, 3 lanes to a kv head
    lanes 192 = 12 panels | 192
    keys  [0, 4000)       | [0, 4064)               what any row of the block meets

Legend: `R` rows, `U` units (a block, a kv head and a piece), `M` merges.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heddle.kernels.paged_decode.plan import PagedPlan

MAX_BLOCK_LANES = 192
"""Lanes of a block: enough that copying a tile of keys costs little beside the products."""
MIN_UNITS = 16
"""Units that work is cut into where there are keys enough, for threads to share."""
MIN_PIECE = 512
"""Keys of a piece at least, where a block is cut in several."""
UNIT_WORDS = 6
MERGE_WORDS = 5


class Block(NamedTuple):
    """Rows [start, end) of one sequence, and a range of keys that holds those of each of them."""

    start: int
    end: int
    first_key: int
    end_key: int


class Work(NamedTuple):
    """What threads do, as words that a kernel reads."""

    lanes: array[int]
    """Lanes of the first kv head that has some, then those of the next."""
    until: array[int]
    """Group g, the lanes of a kv head, is `lanes[until[g] : until[g + 1]]`."""
    heads: array[int]
    """The kv head of each group."""
    units: array[int]
    """`[U, 6]`: first and last row of the block, group, first and last key of the piece, and where
    its partial state begins, in lanes; -1: the block has one piece, and no partial state.
    """
    merges: array[int]
    """`[M, 5]`: first and last row of a block with several pieces, group, where its first partial
    state begins, number of pieces.
    """
    num_partial: int
    """Lanes of all partial states."""
    max_lanes: int
    """Of one unit."""


def work_of(plan: PagedPlan, kv_head_of_lane: npt.NDArray[np.int32]) -> Work:
    """Kept with the plan, which serves every layer of a step."""
    kept = plan.__dict__.setdefault("tiled_work", {})
    key = kv_head_of_lane.tobytes()
    if key not in kept:
        kept[key] = cut(plan, kv_head_of_lane.tolist())
    work: Work = kept[key]
    return work


def cut(plan: PagedPlan, kv_head_of_lane: list[int]) -> Work:
    """Units in the order in which threads take them, long ones first.

    Example:
        >>> rows = np.arange(4)
        >>> plan = PagedPlan(np.zeros((1, 1), int), rows * 0, rows * 0, rows + 1, 16)
        >>> cut(plan, [0, 0, 1, -1]).until
        array('q', [0, 2, 3])
    """
    groups: dict[int, list[int]] = {head: [] for head in sorted({*kv_head_of_lane} - {-1})}
    for lane, head in enumerate(kv_head_of_lane):
        if head >= 0:
            groups[head].append(lane)
    counts = [len(lanes) for lanes in groups.values()]
    blocks = list(_blocks(plan, max(1, MAX_BLOCK_LANES // max(counts, default=1))))
    units, merges, num_partial = [], [], 0
    wanted = -(-MIN_UNITS // max(1, len(blocks) * len(groups)))
    for block in blocks:
        pieces = _pieces(block, wanted)
        for group, count in enumerate(counts):
            lanes = count * (block.end - block.start) if len(pieces) > 1 else 0
            for i, (first, end) in enumerate(pieces):
                place = num_partial + i * lanes if lanes else -1
                units.append((block.start, block.end, group, first, end, place))
            if lanes:
                merges.append((block.start, block.end, group, num_partial, len(pieces)))
            num_partial += lanes * len(pieces)
    units.sort(key=lambda unit: (unit[1] - unit[0]) * (unit[3] - unit[4]))
    most = max((block.end - block.start for block in blocks), default=0)
    return Work(
        array("q", [lane for lanes in groups.values() for lane in lanes]),
        array("q", accumulate(counts, initial=0)),
        array("q", groups),
        array("q", [word for unit in units for word in unit]),
        array("q", [word for merge in merges for word in merge]),
        num_partial,
        most * max(counts, default=0),
    )


def _pieces(block: Block, wanted: int) -> list[tuple[int, int]]:
    """The keys of a block in pieces of about equal size."""
    length = block.end_key - block.first_key
    count = max(1, min(wanted, length // MIN_PIECE))
    cuts = [block.first_key + length * i // count for i in range(count + 1)]
    return list(pairwise(cuts))


def _blocks(plan: PagedPlan, most: int) -> Iterator[Block]:
    """Blocks of at most `most` rows, those of a sequence of about equal size."""
    tables, firsts, ends = plan.table_of_row.tolist(), plan.first.tolist(), plan.end.tolist()
    start = 0
    while start < len(tables):
        stop = start + 1
        while stop < len(tables) and tables[stop] == tables[start]:
            stop += 1
        count = -(-(stop - start) // most)
        cuts = [start + (stop - start) * i // count for i in range(count + 1)]
        for begin, end in pairwise(cuts):
            ranges = zip(firsts[begin:end], ends[begin:end], strict=True)
            seen = [(first, last) for first, last in ranges if first < last]
            least = min((first for first, _ in seen), default=0)
            yield Block(begin, end, least, max((last for _, last in seen), default=least))
        start = stop
