from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import pytest

from heddle.config import ResolvedConfig
from heddle.engine.executors.base import Executor
from heddle.engine.recovery.budget import RestartBudget
from heddle.engine.recovery.restarts import CulpritFound, Restarts
from heddle.errors import ConfigError, HeddleError, PlanMismatch, RankFailed
from tests.support.failing_executor import FailingExecutor, World
from tests.support.fake_executor import resolved_config

Prove = Callable[[ResolvedConfig, Executor], None]


def create(max_restarts: int = 5, due: list[str] | None = None) -> tuple[Restarts, World]:
    world = World(resolved_config(), due=due or [])
    return Restarts(world.create, RestartBudget(max_restarts, lambda: 0.0)), world


def restart(
    restarts: Restarts,
    world: World,
    failure: HeddleError,
    prove: Prove = lambda resolved, executor: None,
) -> FailingExecutor:
    old = world.made[-1] if world.made else world.create(world.resolved)
    given: list[tuple[ResolvedConfig, Executor]] = []

    def note(resolved: ResolvedConfig, executor: Executor) -> None:
        given.append((resolved, executor))
        prove(resolved, executor)

    restarts.note_fault(failure)
    restarts.run(failure, old_config(world), old, note)
    assert old.is_closed
    resolved, executor = given[-1]
    assert executor is world.made[-1]
    assert resolved.epoch == len(world.made) - 1
    assert isinstance(executor, FailingExecutor)
    return executor


def old_config(world: World) -> ResolvedConfig:
    return dataclasses.replace(world.resolved, epoch=len(world.made) - 1)


def failing(*failures: HeddleError) -> Prove:
    """A proof that the first ranks do not pass."""
    left = list(failures)

    def prove(resolved: ResolvedConfig, executor: Executor) -> None:
        if left:
            raise left.pop(0)

    return prove


def test_the_old_executor_is_closed_before_the_next_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    restarts, world = create()
    with caplog.at_level(logging.INFO, "heddle.engine"):
        restart(restarts, world, RankFailed("rank1 failed: killed\nits last words"))
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [
        ("WARNING", "rank1 failed: killed; ranks are started anew (1 of 5 restarts)"),
        ("INFO", "what is known of it: its last words"),
    ]


def test_a_fault_during_a_start_counts_once_and_begins_again() -> None:
    restarts, world = create(3, ["start", "start"])
    assert not restart(restarts, world, RankFailed("x")).is_closed
    assert [executor.is_closed for executor in world.made] == [True, True, True, False]


def test_ranks_that_are_not_proven_are_followed_by_others_and_count() -> None:
    restarts, world = create(2)
    proof = failing(RankFailed("second"))
    assert not restart(restarts, world, RankFailed("first"), proof).is_closed
    assert [executor.is_closed for executor in world.made] == [True, True, False]
    with pytest.raises(RankFailed, match="third"):
        restart(restarts, world, RankFailed("third"))


def test_the_last_failure_is_raised_when_the_budget_is_spent() -> None:
    restarts, world = create(1)
    restart(restarts, world, RankFailed("first"))
    with pytest.raises(RankFailed, match="second"):
        restart(restarts, world, RankFailed("second"))
    assert len(world.made) == 2
    assert world.made[-1].is_closed


def test_failing_starts_spend_the_budget_too() -> None:
    restarts, world = create(2, ["start"] * 5)
    with pytest.raises(RankFailed, match="failed at start"):
        restart(restarts, world, RankFailed("x"))
    assert len(world.made) == 3
    assert all(executor.is_closed for executor in world.made)


def test_what_could_be_mended_by_its_reader_ends_it_at_once() -> None:
    restarts, world = create(5, ["start"])
    world.error = ConfigError
    with pytest.raises(ConfigError, match="failed at start"):
        restart(restarts, world, RankFailed("x"))
    assert len(world.made) == 2


def test_ranks_of_a_proof_that_breaks_off_are_ended() -> None:
    restarts, world = create()
    with pytest.raises(ZeroDivisionError):
        restart(restarts, world, RankFailed("x"), lambda *_: print(1 / 0))
    assert [executor.is_closed for executor in world.made] == [True, True]


def test_new_ranks_that_disagree_again_are_given_up() -> None:
    restarts, world = create()
    restart(restarts, world, PlanMismatch("first"))
    with pytest.raises(PlanMismatch, match="second"):
        restarts.note_fault(PlanMismatch("second"))


def test_new_ranks_that_disagree_while_they_start_are_given_up_too() -> None:
    restarts, world = create()
    with pytest.raises(PlanMismatch, match="second"):
        restart(restarts, world, PlanMismatch("first"), failing(PlanMismatch("second")))
    assert [executor.is_closed for executor in world.made] == [True, True]


def test_ranks_that_disagree_for_the_first_time_while_they_start_are_followed_by_others() -> None:
    restarts, world = create()
    restart(restarts, world, RankFailed("first"), failing(PlanMismatch("second")))
    assert len(world.made) == 3
    with pytest.raises(PlanMismatch, match="third"):  # a proof is no step of requests
        restarts.note_fault(PlanMismatch("third"))


def test_a_good_step_between_two_disagreements_is_a_new_beginning() -> None:
    restarts, world = create()
    for number in range(3):
        restart(restarts, world, PlanMismatch(f"{number}"))
        restarts.note_good_step()
    assert len(world.made) == 4


def test_faults_of_a_request_are_forgiven_once_new_ranks_are_proven() -> None:
    restarts, world = create(2)
    for _ in range(5):
        failures = [RankFailed("1"), RankFailed("2"), RankFailed("3")]
        numbers = []
        for failure in failures:
            numbers.append(restarts.note_fault(failure))
            if failure is failures[-1]:
                restarts.pin(numbers)
            old = world.made[-1] if world.made else world.create(world.resolved)
            restarts.run(failure, old_config(world), old, lambda *_: None)
    assert len(world.made) == 16


def test_a_culprit_that_was_taken_away_costs_no_restart() -> None:
    restarts, world = create(1)
    for number in range(5):
        first = 2 * number
        culprit = CulpritFound("it was this one", [first])
        assert restarts.note_fault(RankFailed("x")) == first
        old = world.made[-1] if world.made else world.create(world.resolved)
        restarts.run(RankFailed("x"), old_config(world), old, failing(culprit))
    assert len(world.made) == 11


def test_nothing_is_started_for_an_engine_that_is_being_closed() -> None:
    restarts, world = create()
    restarts.stop()
    with pytest.raises(RankFailed, match=r"killed; ranks are not started anew.*being closed"):
        restart(restarts, world, RankFailed("rank1 was killed\nits stacks"))
    assert [executor.is_closed for executor in world.made] == [True]


def test_attempts_end_when_the_engine_is_closed_in_the_middle_of_one() -> None:
    restarts, world = create(100, ["start"] * 50)
    start = FailingExecutor.start

    def close_in_the_third(executor: FailingExecutor) -> None:
        if len(world.made) == 4:
            restarts.stop()
        start(executor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FailingExecutor, "start", close_in_the_third)
        with pytest.raises(RankFailed, match="being closed"):
            restart(restarts, world, RankFailed("x"))
    assert len(world.made) == 4
    assert all(executor.is_closed for executor in world.made)
