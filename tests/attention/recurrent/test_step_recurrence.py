"""A step over PCP ranks equals the recurrence, token by token: any cut, class, length and state."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.layout.rows import RowClass, RowRequest
from tests.support.recurrent_step import (
    LAYER,
    check_step,
    draw_layer,
    draw_requests,
    run_step,
)


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, list[tuple[int, RowRequest, int]]]:
    """PCP size, and per request: cached tokens, rows, states to keep."""
    pcp = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        row_class = draw(st.sampled_from(RowClass))
        num_rows = draw(st.one_of(st.integers(1, 3), st.integers(1, 17)))
        row = RowRequest(num_rows, row_class, draw(st.integers(0, pcp - 1)))
        many = pcp == 1 or row_class is RowClass.COPY
        kept = draw(st.integers(1, min(4, num_rows))) if many else 1
        found.append((draw(st.sampled_from([0, 0, 1, 2, 9])), row, kept))
    return pcp, found


@given(
    drawn=parts(),
    chunk_size=st.integers(1, 8),
    is_delta=st.booleans(),
    taps=st.sampled_from([0, 2, 4]),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_a_step_equals_the_recurrence(
    drawn: tuple[int, list[tuple[int, RowRequest, int]]],
    chunk_size: int,
    is_delta: bool,
    taps: int,
    seed: int,
) -> None:
    pcp, found = drawn
    rng = np.random.default_rng(seed)
    sequences, requests = draw_requests(rng, found, is_delta)
    layer = draw_layer(rng, is_delta, taps, has_bias=seed % 2 == 0)
    check_step(layer, sequences, requests, pcp, chunk_size)


def test_what_bypasses_the_state_is_added_once() -> None:
    """`skip` joins the readings of valid rows; the state does not see it."""
    rng = np.random.default_rng(5)
    row = RowRequest(5, RowClass.SPLIT)
    sequences, requests = draw_requests(rng, [(2, row, 1)], is_delta=False)
    layer = draw_layer(rng, False, 4, True)
    plain = run_step(layer, sequences, requests, 2, 4)
    skipped = run_step(layer, sequences, requests, 2, 4, skip=0.5)
    target = torch.tensor(requests[0].targets)
    for before, after in zip(plain, skipped, strict=True):
        assert torch.equal(after.out, before.out + 0.5)
        assert torch.equal(after.store.states(LAYER, target), before.store.states(LAYER, target))
