from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from heddle.scheduler.policy import has_slot, share_rows, short_row_limit

PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6)


@given(PROMPTS, st.integers(0, 100))
def test_the_first_has_half_and_the_shortest_the_rest_and_nothing_is_wasted(prompts, num_rows):
    needs, caps = [list(side) for side in zip(*prompts, strict=True)]
    shares = share_rows(num_rows, needs, caps)
    wanted = [min(need, cap) for need, cap in prompts]
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(num_rows, sum(wanted))
    assert shares[0] >= min(wanted[0], -(-num_rows // 2))
    others = sorted(range(1, len(needs)), key=lambda at: (needs[at], at))
    for shorter, longer in pairwise(others):
        assert shares[shorter] == wanted[shorter] or not shares[longer]


def test_equal_prompts_are_served_one_after_another():
    assert share_rows(7, [100, 100, 100], [100, 100, 100]) == [7, 0, 0]


def test_no_prompt_takes_no_rows():
    assert share_rows(7, [], []) == []


@given(st.integers(0, 50))
def test_long_prompts_keep_half_the_rows_and_the_odd_one(num_rows):
    limit = short_row_limit(num_rows, beside_long=True)
    assert 0 <= num_rows - 2 * limit <= 1


def test_without_long_prompts_short_ones_take_all():
    assert short_row_limit(9, beside_long=False) == 9


@given(st.integers(1, 3), st.lists(st.integers(2, 1 << 20), min_size=1, max_size=200))
def test_slots_and_halves_bound_the_prompts_that_are_part_way_through(slots, arrivals):
    """Needs only shrink once a prompt runs, so at worst each stays what it was."""
    running: list[int] = []
    for need in arrivals:
        if has_slot(need, running, slots):
            running.append(need)
    assert len(running) <= slots + max(arrivals).bit_length()


def test_one_far_shorter_than_all_others_needs_no_slot():
    assert has_slot(50, [100, 6000], 2)
    assert not has_slot(51, [100, 6000], 2)
    assert not has_slot(1, [], 0)
