from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.backends.selected import attend_selected
from tests.support.oracle import dense_row


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    counts=st.lists(st.integers(0, 9), max_size=6),
    pads=st.integers(0, 3),
    lanes=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_each_row_attends_to_its_own_keys(counts, pads, lanes, seed):
    rows, places = len(counts), max(counts, default=0) + pads
    query, key = draw(rows, lanes, 6, seed=seed), draw(rows, places, 6, seed=seed + 1)
    for row, count in enumerate(counts):
        key[row, count:] = math.nan
    value = key[..., :4]
    state = attend_selected(query, key, value, np.array(counts, dtype=np.int64), 0.4)
    assert state.out.shape == (rows, lanes, 4)
    for row, count in enumerate(counts):
        for lane in range(lanes):
            own = key[row, :count].numpy()
            out, lse = dense_row(query[row, lane].numpy(), own, own[:, :4], 0.4)
            np.testing.assert_allclose(state.out[row, lane].numpy(), out, rtol=0, atol=1e-12)
            np.testing.assert_allclose(state.lse[row, lane].numpy(), lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_float32_and_err_at_most_twice_the_plain_softmax(dtype):
    query, key, value = (draw(5, n, 16, seed=n).to(dtype) for n in (3, 200, 200 + 0))
    state = attend_selected(query, key, value, np.full(5, 200), 0.25)
    assert state.out.dtype == state.lse.dtype == torch.float32
    errors = []
    for kind in (torch.float64, torch.float32):
        scores = torch.einsum("rhd,rld->rhl", query.to(kind), key.to(kind)) * 0.25
        out = torch.einsum("rhl,rld->rhd", torch.softmax(scores, -1), value.to(kind))
        errors.append((out, torch.logsumexp(scores, -1)))
    step = torch.finfo(torch.float32).eps
    for ours, exact, plain in zip((state.out, state.lse), *errors, strict=True):
        bound = 2 * (plain - exact).abs().max() + step * exact.abs().max()
        assert (ours - exact).abs().max() <= bound


def test_a_nan_that_counts_reaches_its_row_alone():
    query, key = draw(3, 2, 4), draw(3, 5, 4)
    key[1, 2] = math.nan
    seen = attend_selected(query, key, key, np.array([5, 3, 5]), 1.0)
    assert seen.out[1].isnan().all()
    assert seen.out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("count", [np.array([1, 6]), np.array([-1, 2]), np.array([1])])
def test_counts_beyond_the_places_are_refused(count):
    with pytest.raises(ValueError, match="visible"):
        attend_selected(draw(2, 1, 4), draw(2, 5, 4), draw(2, 5, 4), count, 1.0)
