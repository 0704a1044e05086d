from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.backends.stretches import MIN_MEAN_ROWS, find_stretches

PIECE = st.tuples(
    st.sampled_from(["constant", "rising"]), st.integers(0, 9), st.integers(1, 2 * MIN_MEAN_ROWS)
)


def lengths_of(pieces):
    parts = [
        np.full(count, first) if kind == "constant" else np.arange(first, first + count)
        for kind, first, count in pieces
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def replay(stretches, num_rows):
    """Visible length of each row, as stretches tell it."""
    lengths = np.zeros(num_rows, dtype=np.int64)
    for start, end, rectangle, is_causal in stretches:
        assert (lengths[start:end] == 0).all()
        lengths[start:end] = rectangle + (np.arange(1, end - start + 1) if is_causal else 0)
    return lengths


@given(st.lists(PIECE, max_size=5))
def test_stretches_tell_every_visible_length(pieces):
    lengths = lengths_of(pieces)
    found = find_stretches(lengths)
    if found is not None:
        assert (replay(found, len(lengths)) == lengths).all()


@given(st.sampled_from(["constant", "rising"]), st.integers(0, 9), st.integers(0, 200))
def test_one_pattern_is_always_found(kind, first, count):
    found = find_stretches(lengths_of([(kind, first, count)] if count else []))
    assert found is not None
    assert len(found) <= 1


@pytest.mark.parametrize(
    ("lengths", "stretches"),
    [
        ([], []),
        ([0, 0], []),
        ([5], [(0, 1, 5, False)]),
        ([7, 7, 7], [(0, 3, 7, False)]),
        ([1, 2, 3], [(0, 3, 0, True)]),
        ([4, 5, 6], [(0, 3, 3, True)]),
        ([0, 1, 2], [(1, 3, 0, True)]),
    ],
)
def test_patterns_by_hand(lengths, stretches):
    assert find_stretches(np.array(lengths, dtype=np.int64)) == stretches


def test_two_long_segments_are_two_stretches_and_a_staircase_is_none():
    long = np.concatenate([np.arange(1, 41), np.arange(100, 140)])
    assert find_stretches(long) == [(0, 40, 0, True), (40, 80, 99, True)]
    assert find_stretches(np.repeat(np.arange(50), 2)) is None
