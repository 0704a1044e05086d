"""Needs by counting blocks, position by position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.config.visibility import FULL, Visibility
from heddle.layout.cache_need import (
    UNBOUNDED_TOKENS,
    blocks_needed,
    first_needed_block,
    longest_sequence,
    num_first_blocks,
)

RULES = st.one_of(
    st.just(FULL),
    st.builds(Visibility, st.just("window"), st.integers(1, 9), num_first=st.integers(0, 5)),
    st.builds(Visibility, st.just("chunk"), st.integers(1, 9)),
)


def seen_from(rule: Visibility, position: int, last: int) -> set[int]:
    """Positions that queries at `position` .. `last` see, by definition."""
    found: set[int] = set()
    for query in range(position, last + 1):
        for key in range(query + 1):
            near = {
                "full": True,
                "window": key > query - rule.size or key < rule.num_first,
                "chunk": key // max(rule.size, 1) == query // max(rule.size, 1),
            }
            if near[rule.kind]:
                found.add(key)
    return found


@given(RULES, st.integers(1, 5), st.integers(0, 30), st.integers(1, 6))
def test_no_step_touches_more_blocks_than_the_need(
    rule: Visibility, unit: int, computed: int, rows: int
) -> None:
    last = computed + rows - 1
    touched = {at // unit for at in seen_from(rule, computed, last)} | {
        at // unit for at in range(computed, last + 1)
    }
    kept = set(range(min(num_first_blocks(rule, unit), -(-(last + 1) // unit))))
    assert len(touched | kept) <= blocks_needed(rule, unit, last + 1, rows)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6))
def test_the_need_of_a_window_is_met_somewhere(window: int, unit: int, rows: int) -> None:
    rule = Visibility("window", window)
    worst = max(
        len({at // unit for at in range(max(start + 1 - window, 0), start + rows)})
        for start in range(40, 40 + unit)
    )
    assert worst == blocks_needed(rule, unit, 10**6, rows)


@given(RULES, st.integers(1, 5), st.integers(0, 30))
def test_blocks_before_the_first_needed_one_are_seen_by_nobody_but_for_first_tokens(
    rule: Visibility, unit: int, position: int
) -> None:
    first = first_needed_block(rule, unit, position)
    seen = {at // unit for at in seen_from(rule, position, position + 30)}
    assert all(block >= first or block < num_first_blocks(rule, unit) for block in seen)
    assert first in seen


@given(st.lists(st.tuples(RULES, st.integers(1, 4)), max_size=3), st.integers(0, 12))
def test_the_longest_sequence_fits_and_one_more_token_does_not(
    groups: list[tuple[Visibility, int]], blocks: int
) -> None:
    longest = longest_sequence(groups, blocks, 3)

    def need(num_tokens: int) -> int:
        return sum(blocks_needed(rule, unit, num_tokens, 3) for rule, unit in groups)

    assert need(longest) <= blocks
    assert longest == UNBOUNDED_TOKENS or need(longest + 1) > blocks
    if any(rule.is_full for rule, _ in groups):
        assert longest < UNBOUNDED_TOKENS
