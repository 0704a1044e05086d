"""Visible keys are what the words say, for one position and for arrays of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.visibility import FULL, Visibility
from tests.support.visible import seen_by

RULES = st.one_of(
    st.just(FULL),
    st.builds(Visibility, st.just("window"), st.integers(1, 12), st.integers(0, 9)),
    st.builds(Visibility, st.just("chunk"), st.integers(1, 12)),
)
POSITIONS = st.integers(0, 50)


@given(RULES, POSITIONS)
def test_the_two_ranges_are_disjoint_and_hold_the_visible_keys(
    rule: Visibility, position: int
) -> None:
    first = list(range(rule.first_end(position)))
    main = list(range(rule.start(position), position + 1))
    assert first + main == seen_by(rule, position)


@given(RULES, POSITIONS)
def test_no_later_query_sees_a_key_before_the_needed_ones(rule: Visibility, position: int) -> None:
    later = range(position, position + 30)
    sees = set().union(*(seen_by(rule, query) for query in later)) - set(range(rule.num_first))
    needed = rule.needed_from(position)
    assert min(sees, default=needed) == max(needed, rule.num_first)


@given(RULES, st.lists(POSITIONS, max_size=6))
def test_arrays_are_asked_like_numbers(rule: Visibility, positions: list[int]) -> None:
    rows = np.array(positions, dtype=np.int64)
    assert rule.start(rows).tolist() == [rule.start(p) for p in positions]
    assert rule.first_end(rows).tolist() == [rule.first_end(p) for p in positions]


@pytest.mark.parametrize(
    ("kind", "size", "num_first", "message"),
    [
        ("full", 4, 0, "size=4 is not legal for kind=full"),
        ("window", 0, 0, "size=0 is not legal for kind=window"),
        ("chunk", -3, 0, "size=-3 is not legal for kind=chunk"),
        ("chunk", 4, 1, "num_first=1 is not legal for kind=chunk"),
        ("full", 0, 2, "num_first=2 is not legal for kind=full"),
        ("window", 4, -1, "num_first=-1 is not legal for kind=window"),
    ],
)
def test_sizes_that_a_kind_cannot_have_are_refused(
    kind: str, size: int, num_first: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Visibility(kind, size, num_first)  # type: ignore[arg-type]
