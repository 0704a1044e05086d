"""Who is blamed for ranks that fail, and what new ones must show before they get requests."""

from __future__ import annotations

import logging

import pytest

from heddle.config import ParallelConfig
from heddle.engine.driver import Driver
from heddle.engine.recovery.canary import FIRST_ID
from heddle.engine.recovery.suspects import SUSPECTED_SECONDS
from heddle.errors import PlanMismatch, RankFailed
from tests.engine.test_driver import continue_without_eos, drain, greedy, ids
from tests.engine.test_driver_replicas import MOE
from tests.support.failing_executor import FailingExecutor, World
from tests.support.fake_executor import resolved_config

POISON = 63
MAX_RESTARTS = 5
"""What is allowed unless somebody says otherwise."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def create(max_restarts: int = MAX_RESTARTS, **config: object) -> tuple[Driver, World]:
    world = World(resolved_config(**config), poison=POISON)  # type: ignore[arg-type]
    return world.driver(max_restarts), world


def test_requests_that_ranks_fail_of_one_after_another_do_not_end_the_engine() -> None:
    """With nobody beside them, so that no step of another request ends well in between."""
    driver, world = create()
    num_faults = 0
    for first in range(2, 12):
        driver.add(ids(first, POISON), greedy(4))
        (poison,) = drain(driver).values()
        assert poison.error is not None
        assert poison.error.code == "generation_failed"
        num_faults += 3
        assert len(world.seen) == num_faults == driver.resolved.epoch
    driver.add(ids(3, 5), greedy(4))
    (good,) = drain(driver).values()
    assert list(good.outputs[0].token_ids) == continue_without_eos([3, 5], 4)


def test_requests_that_ranks_fail_of_all_at_once_do_not_end_the_engine() -> None:
    driver, world = create()
    for first in range(2, 12):
        driver.add(ids(first, POISON), greedy(4))
    driver.add(ids(3, 5), greedy(4))
    outputs = drain(driver)
    assert [outputs[str(n)].error is not None for n in range(11)] == [True] * 10 + [False]
    assert list(outputs["10"].outputs[0].token_ids) == continue_without_eos([3, 5], 4)
    assert len(world.seen) == 2 + 10


@pytest.mark.parametrize("dp", [1, 2])
def test_new_ranks_do_a_step_that_nobody_asked_for_before_they_get_requests(dp: int) -> None:
    driver, world = create(parallel=ParallelConfig(data_parallel_size=dp))
    driver.add(ids(3, 4), greedy(6))
    driver.step()
    world.due.append("collect")
    drain(driver)
    first, second = world.made
    assert all(r.request_id < FIRST_ID for batch in first.batches for r in batch.requests)
    begun = [[r.request_id for r in batch.requests] for batch in second.batches]
    assert begun[:dp] == [[FIRST_ID]] * dp
    assert all(id_ < FIRST_ID for ids_ in begun[dp:] for id_ in ids_)


def test_what_new_ranks_show_is_counted_by_nobody() -> None:
    counts = []
    for due in ([], ["collect"]):
        driver, world = create()
        driver.add(ids(3, 4), greedy(6))
        world.due += due
        drain(driver)
        totals = driver.counters.totals()
        assert totals.pop("recoveries") == totals.pop("requests_replayed") == len(due)
        counts.append(totals)
    assert counts[0] == counts[1]


def test_ranks_that_fail_in_that_step_are_a_fault_and_no_request_is_suspected_of_it() -> None:
    driver, world = create()
    driver.add(ids(3, 4), greedy(6))
    driver.step()
    world.due += ["collect"] * 4
    (output,) = drain(driver).values()
    assert output.error is None
    assert [flight for _, flight in world.seen] == [{0}, set(), set(), set()]
    assert driver.resolved.epoch == 4
    assert driver.recovering_since is None


def test_ranks_that_can_never_do_it_are_given_up_and_blame_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, world = create()
    driver.add(ids(2, POISON), greedy(4))
    world.due += ["collect"] * 100
    with pytest.raises(RankFailed, match="failed at collect"):
        drain(driver)
    assert len(world.made) == 1 + MAX_RESTARTS
    assert all(executor.is_closed for executor in world.made)
    assert "others like it are refused" not in caplog.text
    with pytest.raises(RankFailed, match="the engine has failed"):
        driver.add(ids(3, 4), greedy(2))


def test_new_ranks_that_disagree_in_that_step_are_counted_and_given_up() -> None:
    driver, world = create()
    driver.add(ids(3, 4), greedy(6))
    world.due += ["collect", "collect"]
    world.error = PlanMismatch
    with pytest.raises(PlanMismatch):
        drain(driver)
    assert len(world.made) == 2
    assert world.made[-1].is_closed
    assert driver.counters.totals()["mismatches_plan"] == 2


def test_empty_steps_of_other_replicas_do_not_excuse_ranks_that_disagree() -> None:
    """In lockstep an idle replica runs a step without rows beside each step of the others."""
    parallel = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)
    driver, world = create(parallel=parallel, moe=MOE)
    first = driver.add(ids(3, 4, 5), greedy(4))
    driver.add(ids(2, POISON), greedy(4))
    driver.abort(first)
    world.error = PlanMismatch
    with pytest.raises(PlanMismatch, match="failed at poison"):
        drain(driver)
    assert [flight for _, flight in world.seen] == [{1}, {1}]
    assert len(world.made) == 2


def test_faults_long_apart_make_nobody_a_suspect() -> None:
    clock = Clock()
    world = World(resolved_config())
    driver = world.driver(MAX_RESTARTS, clock=clock)
    for first in (3, 5):
        driver.add(ids(first, 4), greedy(30))
    for _ in range(12):
        world.due.append("collect")
        driver.step()
        assert driver._recovery.suspects.on_trial is None
        steps = [output for _ in range(2) for output in driver.step()]
        assert not any(output.error for output in steps)
        clock.now += SUSPECTED_SECONDS
    assert {output.error for output in drain(driver).values()} == {None}


def test_an_engine_that_is_being_closed_starts_no_ranks() -> None:
    driver, world = create()
    driver.add(ids(3, 4), greedy(6))
    driver.step()
    driver.stop_restarts()
    world.due.append("collect")
    with pytest.raises(RankFailed, match=r"failed at collect; .*is being closed"):
        driver.step()
    assert len(world.made) == 1
    assert driver.recovering_since is None


def test_it_says_why_and_who_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    driver, world = create()
    for last in (4, 5):
        driver.add(ids(3, last), greedy(6))
    world.due.append("collect")
    with caplog.at_level(logging.INFO, "heddle.engine"):
        drain(driver)
    (warning, detail, recovered) = (record.getMessage() for record in caplog.records)
    assert warning == "rank 1 failed at collect; ranks are started anew (1 of 5 restarts)"
    assert detail == "what is known of it: its stacks"
    assert recovered.endswith(" s: 2 requests go on")


def test_without_restarts_a_failure_is_raised_as_it_is() -> None:
    resolved = resolved_config()
    world = World(resolved, due=["collect"])
    driver = Driver(resolved, FailingExecutor(resolved, world), None)
    driver.add(ids(3, 4), greedy(6))
    driver.stop_restarts()  # there is nothing to stop
    with pytest.raises(RankFailed, match=r"^rank 1 failed at collect\nits stacks$"):
        driver.step()
