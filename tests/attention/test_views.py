"""Ranges as a backend takes them, and states of disjoint keys put together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.backends.base import KeyRange, checked_visible
from heddle.attention.backends.reference import ReferenceBackend
from heddle.attention.state import AttentionState
from heddle.attention.views import attend, joined, visible_of
from heddle.layout.heads import HeadRun
from heddle.step.views import Ranges
from tests.support.oracle import dense_row

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5)


@given(SPANS, st.booleans())
def test_rows_keep_the_keys_that_their_ranges_name(
    spans: list[tuple[int, int]], from_zero: bool
) -> None:
    first = np.array([0 if from_zero else start for start, _ in spans], dtype=np.int64)
    end = np.array([stop for _, stop in spans], dtype=np.int64)
    visible = visible_of(Ranges(first, end))
    assert isinstance(visible, KeyRange)
    found = zip(*checked_visible(visible, len(spans), 9), strict=True)
    assert [list(range(*row)) for row in found] == [
        list(range(*row)) for row in zip(first, end, strict=True)
    ]


class Constants:
    """The constants of a layer."""

    scale, softcap, sinks = 0.3, 0.0, None


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 1, 4, 6)], ids=len)
def test_pieces_of_the_keys_join_to_attention_over_all(cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 2, 4), (6, 1, 4), (6, 1, 5))
    )
    ends = np.array([6, 2, 0])
    states: list[AttentionState] = []
    for start, end in pairwise(cuts):
        keys = key[start:end], value[start:end]
        seen = np.clip(ends, start, end) - start
        runs = [HeadRun(0, 0, 2)]
        states.append(attend(ReferenceBackend(), Constants(), query, keys, runs, seen))  # type: ignore[arg-type]
    found = joined(states)
    for row, count in enumerate(ends):
        for lane in range(2):
            out, lse = dense_row(
                query[row, lane].numpy(), key[:count, 0].numpy(), value[:count, 0].numpy(), 0.3
            )
            assert np.abs(found.out[row, lane].numpy() - out).max() <= 1e-12
            assert found.lse[row, lane].item() == pytest.approx(lse, abs=1e-12)


def test_a_cap_bends_the_scores() -> None:
    class Capped(Constants):
        softcap = 0.5

    query, key = torch.ones(1, 1, 2, dtype=torch.float64), torch.ones(1, 1, 2, dtype=torch.float64)
    state = attend(ReferenceBackend(), Capped(), query, (key, key), [HeadRun(0, 0, 1)], 1)  # type: ignore[arg-type]
    assert state.lse.item() == pytest.approx(0.5 * np.tanh(0.6 / 0.5), abs=1e-15)


def test_a_state_that_is_nan_is_joined_and_not_refused() -> None:
    good = AttentionState(torch.zeros(1, 1, 2), torch.zeros(1, 1))
    bad = AttentionState(torch.zeros(1, 1, 2), torch.full((1, 1), torch.nan))
    assert joined([good, bad]).lse.isnan().all()
    assert joined([good]) is good
