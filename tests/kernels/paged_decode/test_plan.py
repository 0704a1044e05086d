"""Pieces tile what each row meets, in order, whatever the number of threads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heddle.kernels.paged_decode.plan import MAX_PIECE, MIN_PIECES, PagedPlan

RANGES = st.lists(
    st.tuples(st.integers(0, 700), st.integers(0, 5000)).map(lambda r: (r[0], r[0] + r[1])),
    max_size=5,
)


def plan_of(ranges: list[tuple[int, int]]) -> PagedPlan:
    first = np.array([first for first, _ in ranges], dtype=np.int64)
    end = np.array([end for _, end in ranges], dtype=np.int64)
    tables = np.arange(400, dtype=np.int64)[None]
    return PagedPlan(tables, np.zeros(len(ranges), dtype=np.int64), first, end, 16)


@given(RANGES)
def test_pieces_tile_each_row_in_order(ranges: list[tuple[int, int]]) -> None:
    plan = plan_of(ranges)
    assert plan.num_keys == sum(end - first for first, end in ranges)
    for row, (first, end) in enumerate(ranges):
        own = plan.pieces[plan.pieces_until[row] : plan.pieces_until[row + 1]]
        assert (own[:, 0] == row).all()
        covered = [key for _, start, stop in own.tolist() for key in range(start, stop)]
        assert covered == list(range(first, end))
    assert plan.pieces_until[-1] == len(plan.pieces)


@given(st.integers(1, 5000))
def test_a_row_gives_threads_something_to_share_and_no_piece_is_too_long(length: int) -> None:
    pieces = plan_of([(3, 3 + length)]).pieces
    sizes = (pieces[:, 2] - pieces[:, 1]).tolist()
    assert max(sizes) <= MAX_PIECE
    if length >= MIN_PIECES * 64:
        assert len(sizes) >= MIN_PIECES - 1
