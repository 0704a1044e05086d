"""What a driver does while ranks fail that no machine draws: who waits, who is told, what stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from heddle.config import ParallelConfig, SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from heddle.errors import PlanMismatch, RankFailed
from tests.engine.test_driver import continue_without_eos, drain, greedy, ids
from tests.support.failing_executor import FailingExecutor, World
from tests.support.fake_executor import resolved_config

POISON = 63


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def create(due: Sequence[str] = (), **config: Any) -> tuple[Driver, World]:
    max_restarts = config.pop("max_restarts", 100)
    world = World(resolved_config(**config), poison=POISON, due=list(due))
    return world.driver(max_restarts), world


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def steps(driver: Driver, count: int) -> list[RequestOutput]:
    return [output for _ in range(count) for output in driver.step()]


def test_requests_go_on_in_the_order_in_which_they_came() -> None:
    driver, world = create(max_num_seqs=1, policy="priority")
    for priority in (5, 1, 3):
        driver.add(ids(2, 3, priority), greedy(4), priority=priority)
    steps(driver, 2)
    world.due.append("collect")
    ended = [output.request_id for output in steps(driver, 15) if output.finished]
    assert ended == ["1", "2", "0"]
    assert driver.resolved.epoch == 1
    driver, world = create(max_num_seqs=1)
    for last in (5, 1, 3):
        driver.add(ids(2, 3, last), greedy(4))
    steps(driver, 6)
    world.due.append("collect")
    assert [output.request_id for output in steps(driver, 15) if output.finished] == ["1", "2"]
    assert driver.resolved.epoch == 1


def test_a_pin_is_renewed_for_the_rest_of_its_time() -> None:
    clock = Clock()
    world = World(resolved_config(max_pinned_tokens=64))
    driver = world.driver(clock=clock)
    prompt = PromptInput(token_ids=tuple(range(2, 22)))
    driver.admit(driver.prepare(prompt, greedy(12), pin_seconds=60.0))
    steps(driver, 3)
    assert driver.replicas[0].cache.num_pinned_blocks == 5
    clock.now += 20
    world.due.append("collect")
    steps(driver, 3)
    assert driver.resolved.epoch == 1
    assert driver.replicas[0].cache.num_pinned_blocks == 5
    clock.now += 39
    steps(driver, 1)
    assert driver.replicas[0].cache.num_pinned_blocks == 5
    clock.now += 1
    steps(driver, 1)
    assert driver.replicas[0].cache.num_pinned_blocks == 0


def test_a_pin_that_has_run_out_is_not_renewed() -> None:
    clock = Clock()
    world = World(resolved_config(max_pinned_tokens=64))
    driver = world.driver(clock=clock)
    prompt = PromptInput(token_ids=tuple(range(2, 22)))
    driver.admit(driver.prepare(prompt, greedy(12), pin_seconds=60.0))
    steps(driver, 3)
    clock.now += 60
    world.due.append("collect")
    (output,) = drain(driver).values()
    assert driver.replicas[0].cache.num_pinned_blocks == 0
    assert output.num_pinned_tokens == 0


def test_ranks_that_end_without_work_are_replaced() -> None:
    driver, world = create()
    driver.check_ranks()
    assert driver.resolved.epoch == 0
    world.made[-1].failure = RankFailed("rank 1 has gone")
    driver.check_ranks()
    assert driver.resolved.epoch == 1
    driver.add(ids(3, 4), greedy(5))
    (output,) = drain(driver).values()
    assert tokens(output) == continue_without_eos([3, 4], 5)


def three_in_stages(max_tokens: int) -> tuple[Driver, World, int]:
    """Three requests in three stages, at the moment at which the first one's step is the oldest and
    the second one's the last; and how many tokens the first one has then.
    """
    driver, world = create(parallel=ParallelConfig(pipeline_parallel_size=3))
    for start, count in ((3, max_tokens), (5, 30), (7, 30)):
        driver.add(ids(start, 4), greedy(count))
    first = driver._states["0"].sequences[0]
    for _ in range(30):
        driver.step()
        if [r.request_id for r in driver.replicas[0].requests_under_way()] == [0, 1]:
            return driver, world, len(first.output_token_ids)
    raise AssertionError("that does not happen")


def test_news_of_a_round_is_told_even_if_its_ranks_fail_after_it() -> None:
    """The last request ends while a step of one that has gone is under way; that step fails."""
    _, _, num_tokens = three_in_stages(30)
    driver, world, _ = three_in_stages(num_tokens + 1)
    driver.abort("1")
    driver.abort("2")
    executor = world.made[-1]
    collect = executor.collect

    def fail_later(replica: int) -> Any:
        replies = collect(replica)
        world.due.append("collect")
        return replies

    executor.collect = fail_later  # type: ignore[method-assign]
    (output,) = driver.step()
    assert output.finished
    assert tokens(output) == continue_without_eos([3, 4], num_tokens + 1)
    assert world.seen == [("collect", frozenset({1}))]
    assert driver.resolved.epoch == 1
    assert not driver.is_busy


def on_trial(driver: Driver, world: World, *prompts: Sequence[int]) -> list[str]:
    """Requests of which the first is on trial."""
    names = [driver.add(ids(*prompt), greedy(6)) for prompt in prompts]
    for _ in range(2):
        world.due.append("collect")
        driver.step()
    assert driver._recovery.suspects.on_trial == names[0]
    return names


def test_others_wait_while_one_is_tried_and_are_counted() -> None:
    driver, world = create()
    names = on_trial(driver, world, [2, 3], [4, 5], [6, 7])
    assert driver.num_waiting == 3
    late = driver.add(ids(8, 9), greedy(2))
    found = driver.progress()
    assert set(found) == {*names, late}
    assert not any(progress.is_running for progress in found.values())
    (output,) = driver.step()
    assert output.finished is False or output.request_id == names[0]
    assert driver._recovery.suspects.on_trial == names[1]
    outputs = drain(driver)
    assert set(outputs) == {*names, late}
    for name, prompt in zip(names, ([2, 3], [4, 5], [6, 7]), strict=True):
        assert tokens(outputs[name]) == continue_without_eos(prompt, 6)
    assert driver.resolved.epoch == 2


def test_those_who_wait_and_the_one_on_trial_may_be_given_up() -> None:
    driver, world = create()
    names = on_trial(driver, world, [2, 3], [4, 5], [6, 7])
    for name in (names[1], names[0]):
        output = driver.abort(name)
        assert output is not None
        assert output.outputs[0].finish_reason == "abort"
        driver.audit()
    (left,) = drain(driver).values()
    assert left.request_id == names[2]
    assert tokens(left) == continue_without_eos([6, 7], 6)
    assert driver.num_waiting == 0


def test_the_cause_is_condemned_with_all_that_are_like_it() -> None:
    driver, world = create(max_restarts=2)
    driver.add(ids(2, 3), greedy(6))
    driver.add(ids(2, POISON), greedy(6))
    driver.add(ids(2, POISON), greedy(6))
    driver.add(ids(4, 5), greedy(6))
    outputs = drain(driver)
    errors = [outputs[str(n)].error for n in range(4)]
    assert [error is not None for error in errors] == [False, True, True, False]
    assert tokens(outputs["0"]) == continue_without_eos([2, 3], 6)
    assert tokens(outputs["3"]) == continue_without_eos([4, 5], 6)
    assert driver.resolved.epoch == 3
    assert len(world.seen) == 3


def test_ranks_that_disagree_twice_in_a_row_end_the_engine() -> None:
    driver, world = create(["collect"])
    world.error = PlanMismatch
    driver.add(ids(3, 4), greedy(6))
    driver.step()
    world.due.append("collect")
    with pytest.raises(PlanMismatch, match="failed at collect"):
        driver.step()
    with pytest.raises(RankFailed, match="the engine has failed"):
        driver.step()


def test_a_fault_of_the_driver_itself_is_not_mended() -> None:
    driver, world = create()
    world.made[-1].failure = KeyboardInterrupt()  # type: ignore[assignment]
    driver.add(ids(3, 4), greedy(6))
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    with pytest.raises(RankFailed, match="the engine has failed: KeyboardInterrupt"):
        driver.add(ids(3, 4), SamplingParams(max_tokens=2))
    assert len(world.made) == 1


def test_it_says_while_ranks_are_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, world = create(["collect"])
    seen: list[float | None] = []
    monkeypatch.setattr(
        FailingExecutor, "start", lambda executor: seen.append(driver.recovering_since)
    )
    driver.add(ids(3, 4), greedy(6))
    assert driver.recovering_since is None
    driver.step()
    assert len(world.made) == 2
    (since,) = seen
    assert since is not None
    assert driver.recovering_since is None
