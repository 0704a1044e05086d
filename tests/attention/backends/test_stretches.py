from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.backends.stretches import MIN_MEAN_ROWS, find_stretches

STEPS = {"constant": (0, 0), "causal": (0, 1), "band": (1, 1)}
PIECE = st.tuples(
    st.sampled_from(list(STEPS)),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 2 * MIN_MEAN_ROWS),
)


def ranges_of(pieces):
    """First keys and ends of rows; rows that see nothing are [0, 0)."""
    firsts, ends = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for kind, first, width, count in pieces:
        first_step, end_step = STEPS[kind]
        firsts.append(first + first_step * np.arange(count))
        ends.append(first + width + end_step * np.arange(count))
    first, end = np.concatenate(firsts), np.concatenate(ends)
    return first * (first < end), end * (first < end)


def replay(stretches, num_rows):
    """Range of each row, as stretches tell it."""
    first, end = np.zeros((2, num_rows), dtype=np.int64)
    for start, stop, first_key, end_key, pattern in stretches:
        assert (end[start:stop] == 0).all()
        steps = np.arange(stop - start)
        first[start:stop] = first_key + (steps if pattern == "band" else 0)
        end[start:stop] = end_key + {"constant": 0, "causal": steps + 1, "band": steps}[pattern]
    return first, end


@given(st.lists(PIECE, max_size=5))
def test_stretches_tell_every_range(pieces):
    first, end = ranges_of(pieces)
    found = find_stretches(first, end)
    if found is not None:
        told = replay(found, len(end))
        assert (told[0] == first).all()
        assert (told[1] == end).all()


@given(st.sampled_from(list(STEPS)), st.integers(0, 9), st.integers(1, 9), st.integers(0, 200))
def test_one_pattern_is_always_found(kind, first, width, count):
    found = find_stretches(*ranges_of([(kind, first, width, count)] if count else []))
    assert found is not None
    assert len(found) == min(count, 1)


@pytest.mark.parametrize(
    ("first", "end", "stretches"),
    [
        ([], [], []),
        ([0, 0], [0, 0], []),
        ([0], [5], [(0, 1, 0, 5, "constant")]),
        ([3], [5], [(0, 1, 3, 5, "constant")]),
        ([0, 0, 0], [7, 7, 7], [(0, 3, 0, 7, "constant")]),
        ([2, 2, 2], [7, 7, 7], [(0, 3, 2, 7, "constant")]),
        ([0, 0, 0], [1, 2, 3], [(0, 3, 0, 0, "causal")]),
        ([0, 0, 0], [4, 5, 6], [(0, 3, 0, 3, "causal")]),
        ([4, 4, 4], [5, 6, 7], [(0, 3, 4, 4, "causal")]),
        ([0, 0, 0], [0, 1, 2], [(1, 3, 0, 0, "causal")]),
        ([1, 2, 3], [5, 6, 7], [(0, 3, 1, 5, "band")]),
    ],
)
def test_patterns_by_hand(first, end, stretches):
    ranges = np.array(first, dtype=np.int64), np.array(end, dtype=np.int64)
    assert find_stretches(*ranges) == stretches


def test_long_segments_are_stretches_and_a_staircase_is_none():
    zeros = np.zeros(80, dtype=np.int64)
    long = np.concatenate([np.arange(1, 41), np.arange(100, 140)])
    assert find_stretches(zeros, long) == [(0, 40, 0, 0, "causal"), (40, 80, 0, 99, "causal")]
    assert find_stretches(np.zeros(100, dtype=np.int64), np.repeat(np.arange(50), 2)) is None
    # A prompt under a window of 40: causal at first, then a band.
    end = np.arange(1, 101)
    assert find_stretches(np.maximum(end - 40, 0), end) == [
        (0, 40, 0, 0, "causal"),
        (40, 100, 1, 41, "band"),
    ]
    # Chunked-local attention, chunks of 50.
    positions = np.arange(100)
    assert find_stretches(positions // 50 * 50, positions + 1) == [
        (0, 50, 0, 0, "causal"),
        (50, 100, 50, 50, "causal"),
    ]
