"""Rows that every rank holds: batches of equal shape, kept states, slots that change hands."""

from __future__ import annotations

import numpy as np
import pytest

from heddle.attention.recurrent.direct_rows import create_direct_batches
from heddle.layout.rows import RowClass, RowRequest
from heddle.step.recurrent import DirectRun
from tests.support.recurrent_step import check_step, create_store, draw_layer, draw_requests


def test_runs_of_equal_shape_form_a_batch() -> None:
    store = create_store(draw_layer(np.random.default_rng(0), True, 0, False), [], [])
    runs = [
        DirectRun(0, 1, 3, (3,)),
        DirectRun(1, 4, 0, (4,)),
        DirectRun(4, 5, 5, (6,)),
        DirectRun(5, 8, 7, (7, 8)),
    ]
    batches = create_direct_batches(runs, store)
    assert [batch.rows.tolist() for batch in batches] == [[[0], [4]], [[1, 2, 3]], [[5, 6, 7]]]
    assert [batch.targets.tolist() for batch in batches] == [[[3], [6]], [[4]], [[7, 8]]]
    assert batches[0].sources.tolist() == [3, 5]


@pytest.mark.parametrize("taps", [0, 4])
@pytest.mark.parametrize("kept", [1, 2, 5])
def test_states_after_each_of_the_last_rows_are_kept(kept: int, taps: int) -> None:
    rng = np.random.default_rng(kept)
    row = RowRequest(5, RowClass.COPY)
    sequences, requests = draw_requests(rng, [(3, row, kept), (0, row, kept)], is_delta=True)
    check_step(draw_layer(rng, True, taps, True), sequences, requests, 2, 3)


def test_a_slot_is_read_before_another_request_writes_it() -> None:
    """Two decodes swap slots; a split prompt writes the slot that a decode starts from."""
    rng = np.random.default_rng(1)
    row = RowRequest(1, RowClass.COPY)
    sequences, requests = draw_requests(
        rng,
        [(4, row, 1), (7, row, 1), (2, RowRequest(9, RowClass.SPLIT), 1), (3, row, 1)],
        is_delta=True,
    )
    for request, source, target in zip(requests, (1, 2, 3, 4), (2, 1, 4, 3), strict=True):
        request.source, request.targets = source, (target,)
    check_step(draw_layer(rng, True, 4, True), sequences, requests, 2, 4)


def test_requests_without_rows_hand_on_their_state() -> None:
    rng = np.random.default_rng(2)
    sequences, requests = draw_requests(
        rng,
        [(4, RowRequest(0, RowClass.COPY), 1), (3, RowRequest(0, RowClass.SPLIT), 1)],
        is_delta=False,
    )
    check_step(draw_layer(rng, False, 4, True), sequences, requests, 2, 4)
