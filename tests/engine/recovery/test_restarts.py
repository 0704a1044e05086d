from __future__ import annotations

import dataclasses
import logging

import pytest

from heddle.config import ResolvedConfig
from heddle.engine.recovery.budget import RestartBudget
from heddle.engine.recovery.restarts import Restarts
from heddle.errors import ConfigError, HeddleError, PlanMismatch, RankFailed
from tests.support.failing_executor import FailingExecutor, World
from tests.support.fake_executor import resolved_config


def create(max_restarts: int = 5, due: list[str] | None = None) -> tuple[Restarts, World]:
    world = World(resolved_config(), due=due or [])
    return Restarts(world.create, RestartBudget(max_restarts, lambda: 0.0)), world


def restart(restarts: Restarts, world: World, failure: HeddleError) -> FailingExecutor:
    old = world.made[-1] if world.made else world.create(world.resolved)
    restarts.note_fault(failure)
    resolved, executor = restarts.run(failure, old_config(world), old)
    assert old.is_closed
    assert executor is world.made[-1]
    assert resolved.epoch == len(world.made) - 1
    assert isinstance(executor, FailingExecutor)
    return executor


def old_config(world: World) -> ResolvedConfig:
    return dataclasses.replace(world.resolved, epoch=len(world.made) - 1)


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


def test_new_ranks_that_disagree_again_are_given_up() -> None:
    restarts, world = create()
    restart(restarts, world, PlanMismatch("first"))
    with pytest.raises(PlanMismatch, match="second"):
        restarts.note_fault(PlanMismatch("second"))


def test_a_good_step_between_two_disagreements_is_a_new_beginning() -> None:
    restarts, world = create()
    for number in range(3):
        restart(restarts, world, PlanMismatch(f"{number}"))
        restarts.note_good_step()
    assert len(world.made) == 4
