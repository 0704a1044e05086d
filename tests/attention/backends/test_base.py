from __future__ import annotations

import numpy as np
import pytest

from heddle.attention.backends.base import checked_visible


def test_one_number_serves_all_rows():
    assert checked_visible(3, 2, 3).tolist() == [3, 3]
    assert checked_visible(0, 0, 0).tolist() == []


def test_one_length_per_row_is_kept():
    lengths = np.array([0, 2, 1])
    assert checked_visible(lengths, 3, 2) is lengths


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (4, "4..4 must be within the 3 keys"),
        (-1, "-1..-1 must be within the 3 keys"),
        (np.array([0, 4]), "0..4 must be within"),
        (np.array([1, 2, 3]), r"shape \(3,\); 2 rows need"),
    ],
)
def test_other_lengths_are_refused(visible, message):
    with pytest.raises(ValueError, match=message):
        checked_visible(visible, 2, 3)
