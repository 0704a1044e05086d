from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.bench.timing import interleaved, interleaved_seconds, summary, timed


@given(st.integers(1, 5), st.integers(1, 6))
def test_each_round_runs_all_and_every_second_one_backwards(num_calls, rounds):
    order: list[int] = []

    calls = {str(place): lambda place=place: order.append(place) for place in range(num_calls)}
    found = interleaved(calls, rounds)
    for place in range(rounds):
        turn = order[place * num_calls : (place + 1) * num_calls]
        expected = list(range(num_calls))
        assert turn == (expected if place % 2 == 0 else expected[::-1])
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(calls, rounds)


def test_drift_meets_both_contestants_alike():
    clock = iter(range(100))
    found = interleaved({"a": lambda: next(clock), "b": lambda: next(clock)}, 4)
    assert sum(found["a"]) == sum(found["b"])


def test_calls_are_warm_before_they_are_timed():
    runs: Counter[str] = Counter()
    calls = {name: lambda name=name: runs.update([name]) for name in "ab"}
    found = interleaved_seconds(calls, 3)
    assert runs == {"a": 4, "b": 4}
    assert all(len(times) == 3 and min(times) >= 0 for times in found.values())


def test_a_timed_call_runs_once_a_time_and_lets_errors_through():
    ran = []
    assert timed(lambda: ran.append(1))() >= 0
    assert ran == [1]

    def fail():
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        timed(fail)()


def test_a_summary_is_median_and_minimum():
    assert summary([4.0, 1.0, 3.0, 2.0]) == {"median_seconds": 2.5, "min_seconds": 1.0}
