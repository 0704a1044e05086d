from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.recovery.budget import WINDOW_SECONDS, RestartBudget


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_window_is_ten_minutes() -> None:
    assert WINDOW_SECONDS == 600.0


@given(st.integers(0, 6), st.lists(st.floats(0, 400), min_size=1, max_size=20))
def test_it_is_spent_by_one_fault_more_than_restarts_in_any_window(
    max_restarts: int, pauses: list[float]
) -> None:
    clock = Clock()
    budget = RestartBudget(max_restarts, clock)
    times: list[float] = []
    for number, pause in enumerate(pauses):
        clock.now += pause
        assert budget.note_fault() == number
        times.append(clock.now)
        recent = [time for time in times if clock.now - time < WINDOW_SECONDS]
        assert budget.num_counted == len(recent)
        assert budget.is_spent == (len(recent) > max_restarts)


def test_faults_of_one_request_do_not_count_while_ranks_work() -> None:
    budget = RestartBudget(2, Clock())
    faults = [budget.note_fault() for _ in range(3)]
    assert budget.is_spent
    budget.pin(faults)
    assert budget.num_counted == 0
    budget.note_good_step()
    budget.note_fault()
    assert budget.num_counted == 1


def test_they_count_again_if_ranks_fail_before_a_good_step() -> None:
    budget = RestartBudget(5, Clock())
    budget.pin([budget.note_fault() for _ in range(3)])
    assert budget.num_counted == 0
    budget.note_fault()
    assert budget.num_counted == 4


def test_ranks_that_never_work_are_given_up_whoever_is_blamed() -> None:
    budget = RestartBudget(5, Clock())
    num_faults = 0
    faults: list[int] = []
    while not budget.is_spent:
        faults.append(budget.note_fault())
        num_faults += 1
        if len(faults) == 3:  # the third one is when a request is blamed
            budget.pin(faults)
            faults = []
        assert num_faults < 20
    assert num_faults == 7


def test_a_good_step_alone_forgives_nothing() -> None:
    budget = RestartBudget(1, Clock())
    budget.note_fault()
    budget.note_good_step()
    budget.note_fault()
    assert budget.is_spent
