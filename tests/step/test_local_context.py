"""Parts of gathered keys, in order of position."""

from __future__ import annotations

import numpy as np
import pytest

from heddle.config.visibility import FULL
from heddle.layout.kv import KVLayout
from heddle.step.context import ContextChunk, ContextPiece
from heddle.step.lanes import MergeLanes
from heddle.step.local_context import CachedSequence, KeyContextBuilder, OwnRows, as_slice

TABLE = np.array([5, 2])


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([], slice(0, 0)),
        ([4], slice(4, 5)),
        ([4, 5, 6], slice(4, 7)),
        ([4, 6], None),
        ([5, 4], None),
    ],
    ids=str,
)
def test_only_consecutive_indices_become_a_slice(index: list[int], expected: slice | None) -> None:
    found = as_slice(np.array(index, dtype=np.int64))
    assert (found if isinstance(found, slice) else None) == expected
    assert np.arange(9)[found].tolist() == index


def parts_of(context: str, lanes: int | None) -> list[tuple[list[int], list[int]]]:
    """(keys that came, what the row at 9 sees of them) of positions [0, 7) on rank 1 of 2.

    Interleave 1: rank 0 sends 0 2 4 6, rank 1 sends 1 3 5 and a pad.
    """
    builder = KeyContextBuilder(
        context,
        FULL,
        None if lanes is None else MergeLanes(lanes, 2, 1),
        1,
        lambda _: CachedSequence(TABLE, KVLayout(2, 1, 4), 7),
        {0: OwnRows(0, 1, np.array([9]))},
    )
    chunk = builder.build(ContextChunk((ContextPiece(0, 0, 7),), 4))
    (sent,), (piece,) = chunk.sends, chunk.pieces
    assert (sent.start, sent.end) == (0, 3)
    return [
        (np.arange(8)[part.index].tolist(), [int(ranges.end[0]) for ranges in part.ranges])
        for part in piece.parts
    ]


def test_gathered_keys_are_put_in_order() -> None:
    assert parts_of("gather_kv", None) == [([0, 4, 1, 5, 2, 6, 3], [7])]


def test_a_ring_brings_a_part_from_each_rank() -> None:
    assert parts_of("ring_kv", None) == [([0, 1, 2, 3], [4]), ([0, 1, 2], [3])]


def test_lanes_are_parts_of_what_was_gathered() -> None:
    """Lane 0 has positions 0 4, lane 1: 1 5, lane 2: 2 6, lane 3: 3."""
    assert parts_of("gather_kv", 4) == [([0, 2], [2]), ([4, 6], [2]), ([1, 3], [2]), ([5], [1])]
