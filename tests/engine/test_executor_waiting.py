"""Answers and failures in any order, from ranks that the test plays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from heddle.engine.executors import waiting
from heddle.engine.executors.failure import Failure
from heddle.engine.executors.lifecycle import RanksFailed
from heddle.engine.executors.waiting import Roll, Stoppable, await_answers
from heddle.errors import RankFailed


class Clock:
    """Time passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Played.clock = Clock()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Played:
    """Each poll gives the next batch of events; then there is silence."""

    clock: Clock

    def __init__(self, *polls: list[tuple[int, str | Failure]], patience: float = 0.0) -> None:
        self.polls = list(polls)
        self._patience = patience

    def poll(self, timeout: float) -> list[tuple[int, str | Failure]]:
        if self.polls:
            return self.polls.pop(0)
        self.clock.now += timeout
        return []

    def patience(self, failure: Failure) -> float:
        return self._patience if failure.is_derived else 0.0

    def hung(self, silent: Sequence[int], waited_seconds: float) -> list[Failure]:
        return [Failure(rank=rank, text=f"silent for {waited_seconds:.1f} s") for rank in silent]


LOST = Failure(rank=0, text="peer lost", is_derived=True)


def run(source: Played, world_size: int = 3, limit: float = 0.2) -> list[str]:
    roll: Roll[str] = Roll(world_size)
    await_answers(source, roll, source.clock.now + limit, limit)
    return roll.answers


def failures_of(source: Played) -> list[tuple[int, str]]:
    with pytest.raises(RanksFailed) as caught:
        run(source)
    return [(failure.rank, failure.text) for failure in caught.value.failures]


def test_answers_are_in_order_of_rank_and_later_events_are_left_for_later() -> None:
    source = Played([(2, "c")], [(0, "a"), (1, "b")], [(1, "x")])
    assert run(source) == ["a", "b", "c"]
    assert len(source.polls) == 1


def test_a_wait_ends_soon_after_its_answers_are_not_wanted_any_more(clock: Clock) -> None:
    closing = threading.Event()
    started, limit = clock.now, 600.0

    class Closed(Played):
        def poll(self, timeout: float) -> list[tuple[int, str | Failure]]:
            if clock.now - started > 5.0:
                closing.set()
            return super().poll(timeout)

    roll: Roll[str] = Roll(2)
    source: Stoppable[str] = Stoppable(Closed([(0, "a")]), closing)
    with pytest.raises(RankFailed, match="not wanted any more"):
        await_answers(source, roll, clock.now + limit, limit)
    assert 5.0 < clock.now - started < 6.0
    assert roll.answers == ["a"]


def test_answers_that_are_wanted_are_waited_for_as_ever() -> None:
    for closing in (None, threading.Event()):
        source: Stoppable[str] = Stoppable(Played([(1, "b")]), closing)
        with pytest.raises(RanksFailed) as caught:
            await_answers(source, Roll(2), Played.clock.now + 5.0, 5.0)
        assert [(f.rank, f.text) for f in caught.value.failures] == [(0, "silent for 5.0 s")]
        source = Stoppable(Played([], [(0, "a"), (1, "b")]), closing)
        roll: Roll[str] = Roll(2)
        await_answers(source, roll, Played.clock.now + 5.0, 5.0)
        assert roll.answers == ["a", "b"]


def test_silence_until_the_deadline_is_a_failure_of_the_silent() -> None:
    assert failures_of(Played([(1, "b")])) == [(0, "silent for 0.2 s"), (2, "silent for 0.2 s")]


def test_a_cause_ends_the_wait_at_once_and_nobody_is_blamed_for_silence(clock: Clock) -> None:
    started = clock.now
    cause = Failure(rank=2, text="boom")
    assert failures_of(Played([(0, "a")], [(2, cause)])) == [(2, "boom")]
    assert clock.now == started


def test_a_lost_peer_is_explained_by_what_comes_soon_after() -> None:
    cause = Failure(rank=2, text="killed")
    source = Played([(0, LOST)], [(1, "b")], [(2, cause)], patience=0.1)
    assert failures_of(source) == [(0, "peer lost"), (2, "killed")]


def test_a_lost_peer_without_an_explanation_blames_the_silent(clock: Clock) -> None:
    started = clock.now
    found = failures_of(Played([(0, LOST), (1, "b")], patience=0.05))
    assert [rank for rank, _ in found] == [0, 2]
    assert clock.now == pytest.approx(started + 0.05)


def test_the_end_of_a_rank_that_has_failed_is_no_news() -> None:
    end = Failure(rank=1, text="exit code 1")
    source = Played([(1, Failure(rank=1, text="boom")), (1, end), (0, "a")])
    assert failures_of(source) == [(1, "boom")]


def test_a_failure_beside_the_last_answer_still_counts() -> None:
    source = Played([(0, "a"), (1, "b"), (2, "c"), (1, Failure(rank=1, text="died"))])
    assert failures_of(source) == [(1, "died")]
