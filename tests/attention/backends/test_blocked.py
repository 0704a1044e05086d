from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.backends import blocked as module
from heddle.attention.backends.blocked import blocked
from tests.support.oracle import dense_row


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def watch_blocks(monkeypatch):
    """Rows times lanes, heads and keys of each product."""
    calls = []
    dense = module._dense

    def watched(query, key, value, sees, softcap):
        calls.append((query.shape[1], query.shape[0], key.shape[0]))
        return dense(query, key, value, sees, softcap)

    monkeypatch.setattr(module, "_dense", watched)
    return calls


@pytest.mark.parametrize("max_scores", [1, 24, 60, 1 << 22])
@pytest.mark.parametrize("tile_rows", [1, 2, 64])
@pytest.mark.parametrize(
    ("first", "end"),
    [
        ([0, 0, 0, 0], [7, 7, 7, 7]),
        ([0, 0, 0, 0], [0, 3, 7, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 1]),
        ([4, 5, 5, 6], [5, 6, 7, 9]),
        ([7, 0, 0, 1], [9, 0, 1, 3]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_the_size_of_blocks_and_tiles_has_no_effect(monkeypatch, max_scores, tile_rows, first, end):
    monkeypatch.setattr(module, "MAX_SCORES", max_scores)
    monkeypatch.setattr(module, "MIN_BLOCK_KEYS", 2)
    monkeypatch.setattr(module, "MIN_TILE_ROWS", tile_rows)
    calls = watch_blocks(monkeypatch)
    query, stored = draw(4, 2, 3, 5), draw(9, 2, 5, seed=2)
    state = blocked(query, stored, stored[..., :4], np.array(first), np.array(end), 0.6)
    for row, lane in np.ndindex(4, 6):
        keys = stored[first[row] : end[row], lane // 3].numpy()
        out, lse = dense_row(query[row, lane // 3, lane % 3].numpy(), keys, keys[:, :4], 0.6)
        np.testing.assert_allclose(state.out[row, lane].numpy(), out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.lse[row, lane].numpy(), lse, rtol=0, atol=1e-12)
    assert bool(calls) == any(end)
    # A block never holds more than asked, or one row of the smallest block.
    for rows, heads, keys in calls:
        assert rows * heads * keys <= max(max_scores, 2 * 3 * 2)


def test_memory_is_bounded_by_blocks_not_by_keys(monkeypatch):
    calls = watch_blocks(monkeypatch)
    monkeypatch.setattr(module, "MAX_SCORES", 1 << 18)
    stored = torch.zeros(1, 1, 8).expand(5_000, 1, 8)
    every = np.full(40, 5_000)
    blocked(torch.zeros(40, 1, 16, 8), stored, stored[..., :4], 0 * every, every, 1.0)
    assert len(calls) > 10
    assert max(rows * heads * keys for rows, heads, keys in calls) <= 1 << 18


@pytest.mark.parametrize(("window", "most"), [(8, 9), (100, 1.7), (1000, 1.3)])
def test_tiles_of_a_window_meet_few_keys_beside_their_own(monkeypatch, window, most):
    calls = watch_blocks(monkeypatch)
    first = np.arange(2000)
    blocked(draw(2000, 1, 1, 4), draw(3000, 1, 4), draw(3000, 1, 4), first, first + window, 1.0)
    assert sum(rows * keys for rows, _, keys in calls) <= most * 2000 * window


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_blocks_of_keys_cover_what_some_row_sees_once_and_nothing_else(bounds, most):
    first, end = np.array(bounds).T
    blocks = list(module._key_blocks(first, end, most))
    assert all(0 < stop - start <= most for start, stop in blocks)
    covered = [place for start, stop in blocks for place in range(start, stop)]
    assert covered == sorted({place for low, high in bounds for place in range(low, high)})


def test_a_hole_between_ranges_may_hold_nan():
    key, value = draw(12, 1, 4), draw(12, 1, 4)
    key[3:9] = value[3:9] = math.nan
    query, first, end = draw(3, 1, 2, 4), np.array([0, 9, 0]), np.array([3, 12, 0])
    state = blocked(query, key, value, first, end, 1.0)
    assert state.out.isfinite().all()
    assert (state.lse[2] == -math.inf).all()
