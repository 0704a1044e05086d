"""Ranges of keys against counting them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.visibility import Visibility
from heddle.layout.kv import KVLayout
from heddle.step.views import Ranges, visible_ranges
from tests.support.batches import RULES
from tests.support.visible import seen_by


def members(ranges: tuple[Ranges, ...], row: int) -> list[int]:
    return sorted(key for part in ranges for key in range(int(part.first[row]), int(part.end[row])))


@given(st.sampled_from(RULES), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_ranges_hold_exactly_the_visible_keys(rule: Visibility, rows: list[int]) -> None:
    ranges = visible_ranges(rule, np.array(rows, dtype=np.int64))
    for row, position in enumerate(rows):
        assert members(ranges, row) == seen_by(rule, position)


@given(
    st.sampled_from(RULES),
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.integers(0, 40),
    st.integers(0, 30),
)
def test_clipping_keeps_what_lies_within(
    rule: Visibility, rows: list[int], start: int, length: int
) -> None:
    ranges = visible_ranges(rule, np.array(rows, dtype=np.int64))
    clipped = tuple(part.clipped(start, start + length) for part in ranges)
    for row, position in enumerate(rows):
        kept = [key - start for key in seen_by(rule, position) if start <= key < start + length]
        assert members(clipped, row) == kept


@given(
    st.sampled_from(RULES),
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.sampled_from([(1, 1, 4, 0), (3, 2, 4, 1), (4, 1, 2, 3), (2, 4, 4, 0)]),
)
def test_the_shares_of_a_range_are_ranges_of_stored_rows(
    rule: Visibility, rows: list[int], sizes: tuple[int, int, int, int]
) -> None:
    layout = KVLayout(*sizes)
    ranges = visible_ranges(rule, np.array(rows, dtype=np.int64))
    for place in range(layout.world_size):
        stored = [t for t in range(64) if (t // sizes[1] + sizes[3]) % sizes[0] == place]
        local = tuple(part.local(layout, place) for part in ranges)
        for row, position in enumerate(rows):
            seen = set(seen_by(rule, position))
            assert [stored[i] for i in members(local, row)] == [t for t in stored if t in seen]


def test_the_hull_is_that_of_the_rows_which_meet_something() -> None:
    ranges = Ranges(np.array([9, 4, 0]), np.array([9, 6, 0]))
    assert ranges.hull() == (4, 6)
    assert not ranges.is_empty
    assert Ranges(np.array([5]), np.array([2])).hull() == (0, 0)


@pytest.mark.parametrize(
    ("kind", "size", "first"),
    [("full", 3, 0), ("window", 0, 0), ("chunk", 4, 1), ("window", 2, -1)],
)
def test_impossible_rules_are_refused(kind: str, size: int, first: int) -> None:
    with pytest.raises(ValueError, match="is not legal for kind"):
        Visibility(kind, size, first)  # type: ignore[arg-type]
