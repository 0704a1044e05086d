from __future__ import annotations

import numpy as np
import pytest

from heddle.attention.backends.base import KeyRange, checked_visible


def as_lists(ranges):
    first, end = ranges
    assert first.dtype == end.dtype == np.int64
    return first.tolist(), end.tolist()


def test_an_end_alone_starts_at_the_first_key():
    assert as_lists(checked_visible(3, 2, 3)) == ([0, 0], [3, 3])
    assert as_lists(checked_visible(0, 0, 0)) == ([], [])
    lengths = np.array([0, 2, 1])
    first, end = checked_visible(lengths, 3, 2)
    assert end is lengths
    assert first.tolist() == [0, 0, 0]


def test_ranges_are_kept_and_empty_ones_become_one_form():
    first, end = np.array([1, 0, 2]), np.array([2, 3, 3])
    kept = checked_visible(KeyRange(first, end), 3, 3)
    assert kept[0] is first
    assert kept[1] is end
    assert as_lists(checked_visible(KeyRange(2, end), 3, 3)) == ([0, 2, 2], [0, 3, 3])
    # A first key past all keys is a window that this rank has no part of.
    assert as_lists(checked_visible(KeyRange(9, 3), 2, 3)) == ([0, 0], [0, 0])
    assert as_lists(checked_visible(KeyRange(1, 2), 0, 3)) == ([], [])


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (4, "4..4 must be within the 3 keys"),
        (-1, "-1..-1 must be within the 3 keys"),
        (np.array([0, 4]), "0..4 must be within"),
        (np.array([1, 2, 3]), r"shape \(3,\); 2 rows need"),
        (KeyRange(0, 4), "4..4 must be within"),
        (KeyRange(5, 4), "4..4 must be within"),
        (KeyRange(-2, 3), "first visible key -2; must be at least 0"),
        (KeyRange(np.array([0, -1]), 0), "first visible key -1"),
        (KeyRange(np.array([1, 2, 3]), 3), r"shape \(3,\); 2 rows need"),
    ],
)
def test_other_ranges_are_refused(visible, message):
    with pytest.raises(ValueError, match=message):
        checked_visible(visible, 2, 3)
