from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from heddle.kvcache.runs import FreeRuns


@given(st.integers(0, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 19))))
def test_behaves_like_a_set_of_maximal_sorted_runs(end, moves):
    free, model = FreeRuns(1, end), set(range(1, end))
    for take, number in moves:
        if take and model:
            taken = free.take(1 + number % len(model), after=number)
            assert len(set(taken)) == len(taken) == 1 + number % len(model)
            assert set(taken) <= model
            model -= set(taken)
        elif not take and 1 <= number < end and number not in model:
            free.add(number)
            model.add(number)
        runs = list(free.runs())
        assert {block for start, stop in runs for block in range(start, stop)} == model
        assert all(left[1] < right[0] for left, right in pairwise(runs))
        assert len(free) == len(model)
        assert [number in free for number in range(end + 1)] == [
            number in model for number in range(end + 1)
        ]


@given(st.permutations(range(1, 12)))
def test_whatever_the_order_of_return_all_ids_make_one_run(order):
    free = FreeRuns(1, 12)
    assert free.take(11) == list(range(1, 12))
    for block in order:
        free.add(block)
    assert list(free.runs()) == [(1, 12)]


def with_runs(*runs):
    free = FreeRuns(0, 0)
    for start, end in runs:
        for block in range(start, end):
            free.add(block)
    return free


def test_a_growing_table_continues_where_it_ends():
    assert with_runs((3, 5), (8, 20)).take(3, after=2) == [3, 4, 8]


def test_without_a_successor_the_largest_run_serves():
    assert with_runs((1, 3), (8, 12), (14, 16)).take(2, after=30) == [8, 9]


def test_a_run_that_only_contains_the_successor_is_not_a_continuation():
    # 5 follows 4, but 4 itself is free: the table's end cannot be 4.
    assert with_runs((4, 7), (9, 19)).take(1, after=4) == [9]


def test_a_large_want_takes_few_runs():
    assert with_runs((1, 3), (5, 6), (8, 12)).take(6) == [8, 9, 10, 11, 1, 2]
