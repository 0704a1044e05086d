from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.simulator.tally import MAX_POINTS, Sample, Series, Spread, Tally, Times, percentiles


def nearest_rank(values: list[float], percent: int) -> float:
    """The smallest value that at least so many percent of all do not exceed."""
    return min(v for v in values if sum(w <= v for w in values) * 100 >= percent * len(values))


values = st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=60)


@given(values)
def test_percentiles_are_those_of_the_definition(found: list[float]) -> None:
    described = percentiles(found)
    assert described is not None
    for percent in (50, 90, 99):
        assert described[f"p{percent}"] == nearest_rank(found, percent)
    assert described["max"] == max(found)


@given(values, st.integers(1, 3))
def test_a_spread_is_right_to_a_thousandth(found: list[float], times: int) -> None:
    one_by_one, at_once = Spread(), Spread()
    for value in found:
        one_by_one.add(value, times)
    at_once.add_all(np.array(found), times)
    for spread in (one_by_one, at_once):
        described = spread.describe()
        assert described is not None
        for percent in (50, 90, 99):
            exact = nearest_rank(found * times, percent)
            assert described[f"p{percent}"] == pytest.approx(exact, rel=1.1e-3)
        assert described["max"] == max(found)
        assert described["mean"] == pytest.approx(math.fsum(found) / len(found))


def test_nothing_has_no_percentiles() -> None:
    assert percentiles([]) is None
    assert Spread().describe() is None


def test_gaps_of_zero_have_a_place() -> None:
    spread = Spread()
    spread.add(0.0, 9)
    spread.add(2.0)
    described = spread.describe()
    assert described is not None
    assert (described["p50"], described["max"]) == (0.0, 2.0)
    assert described["p99"] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("count", [1, 399, 400, 5000])
def test_a_series_stays_short_and_even(count: int) -> None:
    series = Series(0.5)
    end = count * 0.5
    while series.next_time < end:
        time = series.next_time
        series.add(Sample(time, 0.25, 1, 2, round(time * 10)))
    columns = series.describe()
    assert {len(column) for column in columns.values()} == {len(series.samples)}
    assert 0 < len(series.samples) <= MAX_POINTS
    assert len(series.samples) >= min(count, MAX_POINTS // 2)
    gaps = set(np.diff(columns["time_s"]).tolist())
    assert len(gaps) <= 1
    # Ten tokens a second were given out, whatever the distance of samples.
    assert all(rate == 10.0 for rate in columns["tok_s"][1:])


def test_tokens_of_a_request_make_gaps() -> None:
    tally, times = Tally(), Times(arrival=1.0, prompt_len=5)
    for now in (3.0, 3.5, 5.5):
        tally.note_token(times, now)
    assert (times.first, times.last, times.num_tokens) == (3.0, 5.5, 3)
    assert (tally.num_tokens, tally.longest_gap) == (3, 2.0)
    described = tally.gaps.describe()
    assert described is not None
    assert described["mean"] == 1.25
