from __future__ import annotations

from itertools import pairwise

import pytest

from heddle.comm.shared_memory import geometry
from heddle.comm.shared_memory.geometry import Geometry
from heddle.layout.mesh import GROUP_KINDS


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 5000])
def test_no_two_ranks_write_to_the_same_place(world_size: int) -> None:
    found = Geometry(world_size)
    starts = [(found.flags, world_size)]
    starts += [(found.record(rank), geometry.PAGE_BYTES) for rank in range(world_size)]
    starts += [
        (found.slot(kind, position), geometry.SLOT_BYTES)
        for kind in GROUP_KINDS
        for position in range(world_size)
    ]
    for (first, size), (second, _) in pairwise(starts):
        assert first + size <= second
    last, size = starts[-1]
    assert last + size == found.num_bytes
    assert all(start % geometry.PAGE_BYTES == 0 for start, _ in starts)


def test_the_slots_of_a_group_are_adjacent() -> None:
    found = Geometry(4)
    assert found.slot("dcp", 3) - found.slot("dcp", 2) == geometry.SLOT_BYTES


def test_the_parts_of_a_slot_do_not_overlap() -> None:
    lines = geometry.LINE_BYTES
    ends = [
        (geometry.ROUND_LINE, lines),
        (geometry.SHIFT_LINES, 2 * lines),
        (geometry.SEND_LINES, 2 * lines),
        (geometry.ROUND_TEXTS, 2 * geometry.TEXT_BYTES),
        (geometry.SHIFT_NOTES, geometry.SHIFT_PIECES * geometry.NOTE_BYTES),
        (geometry.SEND_NOTES, geometry.SEND_PIECES * geometry.NOTE_BYTES),
        (geometry.ROUND_DATA, 2 * geometry.BOX_BYTES),
        (geometry.SHIFT_DATA, geometry.SHIFT_PIECES * geometry.PIECE_BYTES),
        (geometry.SEND_DATA, geometry.SEND_PIECES * geometry.PIECE_BYTES),
    ]
    for (first, size), (second, _) in pairwise(ends):
        assert first + size <= second
    last, size = ends[-1]
    assert last + size == geometry.SLOT_BYTES
    assert geometry.SEND_NOTES + ends[5][1] <= geometry.PAGE_BYTES
    assert all(start % lines == 0 for start, _ in ends)
