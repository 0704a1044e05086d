"""What rules share."""

from __future__ import annotations

import pytest

from heddle.layout.choice import LayoutChoice
from heddle.layout.rule import is_count, moved
from tests.support.layouts import degrees


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1,), True),
        ((3, 7), True),
        ((1, 0), False),
        ((True,), False),
        ((1.0,), False),
        ((None,), False),
    ],
)
def test_counts_are_positive_whole_numbers(values: tuple[object, ...], expected: bool) -> None:
    assert is_count(*values) is expected


def test_moved_changes_one_setting() -> None:
    found = [choice.parallel for choice in moved(LayoutChoice(), "tensor_parallel_size", [2, 3])]
    assert found == [degrees(2, 1, 1), degrees(3, 1, 1)]
