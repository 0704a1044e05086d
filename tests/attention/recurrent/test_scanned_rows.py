"""Rows that are dealt to ranks: halos of any reach, ranks without rows."""

from __future__ import annotations

import numpy as np
import pytest

from heddle.layout.rows import RowClass, RowRequest
from tests.support.recurrent_step import check_step, draw_layer, draw_requests


@pytest.mark.parametrize("cached", [0, 1, 5])
@pytest.mark.parametrize("num_rows", range(1, 10))
@pytest.mark.parametrize("pcp", [2, 3, 4])
def test_segments_shorter_than_the_convolution(pcp: int, num_rows: int, cached: int) -> None:
    """Halos then reach through several segments, and through empty ones."""
    rng = np.random.default_rng(num_rows)
    sequences, requests = draw_requests(
        rng, [(cached, RowRequest(num_rows, RowClass.SPLIT), 1)], is_delta=True
    )
    check_step(draw_layer(rng, True, 4, False), sequences, requests, pcp, 3)


def test_a_rank_without_rows_takes_part() -> None:
    """All dealt rows are on one rank; the others say the same and learn the state."""
    rng = np.random.default_rng(0)
    sequences, requests = draw_requests(
        rng,
        [(3, RowRequest(6, RowClass.WHOLE, 2), 1), (0, RowRequest(2, RowClass.WHOLE, 2), 1)],
        is_delta=True,
    )
    check_step(draw_layer(rng, True, 4, True), sequences, requests, 3, 4)


@pytest.mark.parametrize("is_delta", [False, True])
def test_long_segments_of_many_chunks(is_delta: bool) -> None:
    rng = np.random.default_rng(4)
    sequences, requests = draw_requests(
        rng, [(9, RowRequest(150, RowClass.SPLIT), 1)], is_delta=is_delta
    )
    check_step(draw_layer(rng, is_delta, 4, True), sequences, requests, 2, 16)
