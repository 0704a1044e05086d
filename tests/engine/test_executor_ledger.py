"""Replies are matched to steps by order, whatever the order of arrival."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.executors.deadline import FLOOR_SECONDS
from heddle.engine.executors.ledger import StepLedger
from heddle.errors import HeddleError
from heddle.step.batch import RankReply
from tests.support.fake_worker import fake_batch

RANKS = ((0, 1), (2, 3))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reply(rank: int, step: int) -> RankReply:
    return RankReply(epoch=0, step=step, digest=0, coverage=(rank,))


def create(*, in_lockstep: bool = False, limit: float = 100.0) -> tuple[StepLedger, Clock]:
    clock = Clock()
    return StepLedger(RANKS, limit, in_lockstep=in_lockstep, clock=clock), clock


@given(st.data())
def test_any_order_of_arrival_gives_the_same_steps(data: st.DataObject) -> None:
    ledger, _ = create()
    counts = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    for replica, count in enumerate(counts):
        for step in range(count):
            ledger.submit({replica: (fake_batch(step), step)})
    streams = [rank for replica, ranks in enumerate(RANKS) for rank in ranks * counts[replica]]
    sent = dict.fromkeys(range(4), 0)
    taken: dict[int, list[int]] = {0: [], 1: []}
    for rank in data.draw(st.permutations(streams)):
        ledger.add(rank, reply(rank, sent[rank]))
        sent[rank] += 1
        while data.draw(st.booleans()) and (done := ledger.first_done([0, 1])) is not None:
            ended, replies = ledger.take(done)
            assert [r.coverage for r in replies] == [(rank,) for rank in RANKS[done]]
            assert {r.step for r in replies} == {ended.batch.step} == {ended.digest}
            taken[done].append(ended.batch.step)
    while (done := ledger.first_done([0, 1])) is not None:
        taken[done].append(ledger.take(done)[0].batch.step)
    assert [taken[0], taken[1]] == [list(range(count)) for count in counts]
    assert ledger.is_idle


def test_the_step_that_was_submitted_first_is_first_among_those_that_are_done() -> None:
    ledger, _ = create()
    ledger.submit({1: (fake_batch(0), 0)})
    ledger.submit({0: (fake_batch(1), 0)})
    assert ledger.oldest([0, 1]) == 1
    for rank in (0, 1):
        ledger.add(rank, reply(rank, 1))
    assert ledger.first_done([0, 1]) == 0
    assert ledger.first_done([1]) is None
    for rank in (2, 3):
        ledger.add(rank, reply(rank, 0))
    assert ledger.first_done([0, 1]) == 1


def test_a_rank_works_on_the_step_after_its_last_reply() -> None:
    ledger, _ = create()
    for step in (5, 6):
        ledger.submit({0: (fake_batch(step), 0)})
    ledger.add(1, reply(1, 5))
    steps = [ledger.step_of(rank) for rank in (0, 1, 2)]
    assert [step and step.batch.step for step in steps] == [5, 6, None]
    assert ledger.owing([0, 1]) == {0, 1}
    ledger.add(1, reply(1, 6))
    assert ledger.owing([0, 1]) == {0}


def test_a_reply_too_many_is_refused() -> None:
    ledger, _ = create()
    with pytest.raises(HeddleError, match="rank 2 sent a reply that no step waits for"):
        ledger.add(2, reply(2, 0))


def test_waiting_for_nothing_is_refused_and_so_is_a_replica_that_is_not_there() -> None:
    ledger, _ = create()
    with pytest.raises(ValueError, match="no step is under way"):
        ledger.oldest([0, 1])
    with pytest.raises(ValueError, match=r"replica 2; must be in \[0, 2\)"):
        ledger.submit({2: (fake_batch(0), 0)})
    assert ledger.is_idle


def test_a_step_has_time_for_those_before_it_from_when_it_became_the_oldest() -> None:
    ledger, clock = create(limit=100.0)
    first = ledger.submit({0: (fake_batch(0), 0)})[0]
    clock.now = 3.0
    second = ledger.submit({0: (fake_batch(1), 0)})[0]
    assert (first.deadline, second.deadline) == (100.0, float("inf"))
    assert second.seconds == 200.0
    for rank in (0, 1):
        ledger.add(rank, reply(rank, 0))
    clock.now = 7.0
    ledger.take(0)
    assert second.deadline == 207.0
    # The fit counts from the submission: 7 s for such a step, of which 8 times may pass.
    assert ledger.submit({1: (fake_batch(2), 0)})[1].seconds == 56.0


def test_only_late_replicas_are_silent_and_in_lockstep_all_are() -> None:
    for in_lockstep in (False, True):
        ledger, clock = create(in_lockstep=in_lockstep)
        ledger.submit({0: (fake_batch(0), 0)})
        clock.now = 50.0
        ledger.submit({1: (fake_batch(0), 0)})
        clock.now = 101.0
        assert ledger.first_late([0, 1]) is ledger.head(0)
        assert ledger.owing([0, 1]) == ({0, 1, 2, 3} if in_lockstep else {0, 1})
        assert ledger.owing([0, 1], failed=[2]) == ({0, 1, 2, 3} if in_lockstep else {2, 3})


def test_in_lockstep_an_empty_step_may_take_as_long_as_the_longest() -> None:
    long, short = (fake_batch(1, num_rows=500), 0), (fake_batch(1, num_rows=1), 0)
    for in_lockstep in (False, True):
        ledger, clock = create(in_lockstep=in_lockstep, limit=10000.0)
        ledger.submit({0: (fake_batch(0, num_rows=1), 0)})
        for rank in (0, 1):
            ledger.add(rank, reply(rank, 0))
        clock.now = 1.0
        ledger.take(0)
        steps = ledger.submit({0: long, 1: short})
        assert steps[0].seconds > 1000.0
        assert (steps[1].seconds > 1000.0) == in_lockstep
        assert in_lockstep or steps[1].seconds == FLOOR_SECONDS
