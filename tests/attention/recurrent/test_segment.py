"""A sequence cut anywhere: maps give the states, reaches complete the readings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.recurrent.segment import SegmentMap, run_segment
from tests.attention.recurrent.test_chunked import HEADS, KEY, VALUE, draw


@given(
    cuts=st.lists(st.integers(0, 17), max_size=5).map(sorted),
    chunk_size=st.integers(1, 9),
    is_delta=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_scan_over_any_cut_equals_the_recurrence(
    cuts: list[int], chunk_size: int, is_delta: bool, seed: int
) -> None:
    """Equal cuts make empty segments, which change nothing."""
    terms, out, states = draw(seed, 17, is_delta)
    state = states[0]
    for start, end in zip([0, *cuts], [*cuts, 17], strict=True):
        segment = run_segment(terms.pick(slice(start, end)), chunk_size)
        assert segment.out.shape == (end - start, HEADS, VALUE)
        if end > start:
            assert (segment.read(state) - out[start:end]).abs().max() <= 1e-12
        state = segment.map.apply(state)
        assert (state - states[end]).abs().max() <= 1e-12


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_packed_map_is_the_map(is_delta: bool) -> None:
    terms, _, states = draw(5, 6, is_delta)
    sent = run_segment(terms, 4).map
    packed = sent.pack()
    assert packed.shape == (HEADS, terms.map_width)
    received = SegmentMap.unpack(packed, KEY, VALUE)
    assert torch.equal(received.psi, sent.psi)
    assert torch.equal(received.phi, sent.phi)
    assert torch.equal(received.apply(states[3]), sent.apply(states[3]))


@pytest.mark.parametrize("is_delta", [False, True])
def test_an_empty_segment_is_the_identity(is_delta: bool) -> None:
    terms, _, states = draw(5, 6, is_delta)
    empty = run_segment(terms.pick(slice(2, 2)), 4).map
    assert torch.equal(empty.apply(states[6]), states[6])
