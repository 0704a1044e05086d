from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.recovery.refused import REFUSED_SECONDS
from heddle.engine.recovery.suspects import SUSPECTED_SECONDS, Suspects


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def seat(suspects: Suspects, *sequences: int) -> None:
    """All of a request are open, and are told apart by its letter elsewhere."""
    suspects.seat(sequences)


def test_one_fault_is_nobodys() -> None:
    suspects = Suspects(Clock())
    assert suspects.note_fault(0, ["a", "b"]) is None
    assert suspects.on_trial is None
    assert suspects.may_run("a")
    assert suspects.faults_of("a") == {0}


def test_who_was_in_flight_twice_is_tried_alone_and_the_others_wait() -> None:
    suspects = Suspects(Clock())
    suspects.note_fault(0, ["a", "b", "c"])
    suspects.note_fault(1, ["b", "c", "d"])
    assert suspects.on_trial == "b"
    assert [suspects.may_run(each) for each in "abcde"] == [False, True, False, False, False]


def test_a_token_of_each_sequence_ends_a_trial() -> None:
    suspects = Suspects(Clock())
    for number in range(2):
        suspects.note_fault(number, ["a", "b"])
    seat(suspects, 10, 11)
    suspects.note_token(10)
    suspects.note_token(10)
    assert (suspects.on_trial, suspects.has_moved) == ("a", False)
    suspects.note_token(11)
    assert (suspects.on_trial, suspects.has_moved) == ("b", True)
    assert suspects.faults_of("a") == set()
    seat(suspects, 12)
    assert not suspects.has_moved
    suspects.note_token(12)
    assert suspects.on_trial is None
    assert suspects.may_run("c")


def test_who_is_alone_when_ranks_fail_is_the_cause() -> None:
    suspects = Suspects(Clock())
    for number in range(2):
        assert suspects.note_fault(number, ["a", "b"]) is None
    seat(suspects, 1)
    assert suspects.note_fault(2, ["a"]) == "a"
    assert suspects.faults_of("a") == {0, 1, 2}
    suspects.forget("a")
    assert suspects.on_trial == "b"


def test_ranks_that_fail_without_it_do_not_condemn_the_one_on_trial() -> None:
    suspects = Suspects(Clock())
    for number in range(2):
        suspects.note_fault(number, ["a"])
    assert suspects.note_fault(2, []) is None
    assert suspects.on_trial == "a"


def test_a_suspect_that_ends_is_tried_no_more() -> None:
    suspects = Suspects(Clock())
    for number in range(2):
        suspects.note_fault(number, ["a", "b", "c"])
    suspects.forget("b")
    suspects.forget("a")
    assert (suspects.on_trial, suspects.has_moved) == ("c", True)
    suspects.forget("c")
    assert suspects.on_trial is None
    suspects.forget("never known")


@given(st.lists(st.integers(1, 900), min_size=1, max_size=8))
def test_two_faults_within_ten_minutes_are_a_suspicion_and_others_are_not(
    pauses: list[int],
) -> None:
    """A request that no fault but these has met is tried once two of them are close enough."""
    assert SUSPECTED_SECONDS == REFUSED_SECONDS == 600.0
    clock = Clock()
    suspects = Suspects(clock)
    suspects.note_fault(0, ["a"])
    for number, pause in enumerate(pauses, start=1):
        clock.now += pause
        suspects.note_fault(number, ["a"])
        if min(pauses[:number]) < SUSPECTED_SECONDS:
            assert suspects.on_trial == "a"
            return
        assert suspects.on_trial is None
        assert suspects.faults_of("a") == {number}


def test_a_trial_does_not_age() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    for number in range(2):
        suspects.note_fault(number, ["a", "b"])
    clock.now += 10 * SUSPECTED_SECONDS
    assert suspects.note_fault(2, ["a"]) == "a"
    suspects.forget("a")
    assert suspects.on_trial == "b"


@given(st.integers(2, 8), st.data())
def test_the_cause_is_found_by_the_time_that_all_were_tried(num: int, data: st.DataObject) -> None:
    names = [f"r{index}" for index in range(num)]
    cause = data.draw(st.sampled_from(names))
    suspects = Suspects(Clock())
    suspects.note_fault(0, names)
    suspects.note_fault(1, names)
    num_trials = 0
    while (tried := suspects.on_trial) is not None:
        num_trials += 1
        suspects.seat([int(tried[1:])])
        if tried == cause:
            assert suspects.note_fault(2, [tried]) == cause
            suspects.forget(cause)
        else:
            suspects.note_token(int(tried[1:]))
    assert num_trials == num
