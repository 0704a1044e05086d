"""The fit never falls below the cost it is meant to bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.executors.deadline import FACTOR, FLOOR_SECONDS, StepDeadline, StepWork
from tests.support.fake_worker import fake_batch

works = st.builds(StepWork, st.integers(1, 600), st.integers(1, 10**7))
coefficients = st.floats(0.0, 2.0)


def test_work_counts_rows_and_visible_pairs() -> None:
    assert StepWork.of(fake_batch(0, num_rows=3, context=10)) == StepWork(rows=3, pairs=39)


def test_without_a_fit_the_limit_is_the_deadline() -> None:
    assert StepDeadline(300.0).seconds(StepWork(1, 1)) == 300.0


def test_quick_steps_keep_the_floor_and_slow_ones_stretch_it() -> None:
    deadline = StepDeadline(300.0)
    deadline.observe(StepWork(1, 100), 0.05)
    assert deadline.seconds(StepWork(1, 100)) == 10.0
    # 40 times the pairs: at most 40 * 0.05 s = 2 s, times 8.
    assert deadline.seconds(StepWork(1, 4000)) == 16.0
    # A chunk of 512 rows after decode steps only: 25.6 s, times 8.
    assert deadline.seconds(StepWork(512, 51200)) == 8 * 512 * 0.05


def test_the_limit_is_never_exceeded_and_may_be_below_the_floor() -> None:
    deadline = StepDeadline(3.0)
    deadline.observe(StepWork(1, 1), 100.0)
    assert deadline.seconds(StepWork(500, 500)) == 3.0
    deadline.observe(StepWork(1, 1), 0.001)
    assert deadline.seconds(StepWork(1, 1)) == 3.0


@given(st.lists(works, min_size=1, max_size=50), works, coefficients, coefficients, coefficients)
def test_fit_is_never_below_a_cost_linear_in_rows_and_pairs(
    seen: list[StepWork], new: StepWork, a: float, b: float, c: float
) -> None:
    def cost(work: StepWork) -> float:
        return a + b * work.rows + c * work.pairs / 1e4

    deadline = StepDeadline(float("inf"))
    for work in seen:
        deadline.observe(work, cost(work))
    assert deadline.seconds(new) >= max(FLOOR_SECONDS, FACTOR * cost(new)) * (1 - 1e-12)


@given(works)
def test_a_repeated_step_is_given_eight_times_what_it_took(work: StepWork) -> None:
    deadline = StepDeadline(1000.0)
    deadline.observe(work, 7.0)
    assert deadline.seconds(work) == 56.0


def test_old_steps_are_forgotten() -> None:
    deadline = StepDeadline(1000.0)
    deadline.observe(StepWork(1, 1), 0.001)
    for _ in range(40):
        deadline.observe(StepWork(1, 1), 50.0)
    assert deadline.seconds(StepWork(1, 1)) == 400.0
