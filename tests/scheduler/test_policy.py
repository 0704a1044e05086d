from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.scheduler.policy import share_rows, short_row_limit

PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6)


@given(PROMPTS, st.integers(0, 100))
def test_shares_are_fair_and_nothing_is_wasted(prompts, spare):
    needs, caps = [list(side) for side in zip(*prompts, strict=True)]
    num_rows = len(prompts) + spare
    shares = share_rows(num_rows, needs, caps)
    wanted = [min(need, cap) for need, cap in prompts]
    assert all(1 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(num_rows, sum(wanted))
    unmet = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert all(max(shares) - share <= 1 for share in unmet)


def test_the_older_gets_the_odd_row():
    assert share_rows(7, [100, 100, 100], [50, 50, 50]) == [3, 2, 2]


@given(st.integers(0, 50), st.integers(1, 8))
def test_long_prompts_keep_half_the_rows_and_one_each(num_rows, num_long):
    limit = short_row_limit(num_rows, num_long)
    assert limit <= num_rows // 2
    assert num_rows - limit >= num_long or num_rows < num_long


def test_without_long_prompts_short_ones_take_all():
    assert short_row_limit(9, 0) == 9
