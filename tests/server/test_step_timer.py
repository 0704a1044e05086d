"""An executor that is watched does what it did before."""

from __future__ import annotations

import pytest

from heddle.config import ParallelConfig, SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.server.step_timer import WatchedExecutor
from tests.support.fake_executor import FakeExecutor, resolved_config, toy_greedy


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_answers_are_those_of_the_inner_executor() -> None:
    resolved = resolved_config(parallel=ParallelConfig(data_parallel_size=2))
    inner = FakeExecutor(resolved)
    with WatchedExecutor(inner, Ticks()) as executor:
        driver = Driver(resolved, executor, None)
        params = SamplingParams(temperature=0.0, max_tokens=4)
        prompts = [(2, 3, 4), (9, 8, 7)]
        names = [driver.add(PromptInput(token_ids=prompt), params) for prompt in prompts]
        last = {}
        while driver.has_work:
            last |= {output.request_id: output for output in driver.step()}
    assert executor.world_size == inner.world_size == 2
    for name, prompt in zip(names, prompts, strict=True):
        assert list(last[name].outputs[0].token_ids) == toy_greedy(prompt, 4)
    assert inner.is_closed


def test_steps_of_a_replica_are_timed_oldest_first() -> None:
    resolved = resolved_config(parallel=ParallelConfig(pipeline_parallel_size=2))
    executor = WatchedExecutor(FakeExecutor(resolved), Ticks())
    driver = Driver(resolved, executor, None)
    for first in (2, 30):
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        driver.add(PromptInput(token_ids=(first, first + 1)), params)
    spans = []
    while driver.has_work:
        driver.step()
        assert executor.ended is not None
        spans.append((executor.ended.batch.step, executor.ended.begin, executor.ended.end))
    assert [step for step, _, _ in spans] == list(range(len(spans)))
    assert all(begin < end for _, begin, end in spans)
    assert len({begin for _, begin, _ in spans}) == len(spans) > 3


def test_a_failed_step_leaves_the_last_good_one() -> None:
    resolved = resolved_config()
    inner = FakeExecutor(resolved)
    executor = WatchedExecutor(inner, Ticks())
    driver = Driver(resolved, executor, None)
    driver.add(PromptInput(token_ids=(2, 3)), SamplingParams(max_tokens=5, ignore_eos=True))
    driver.step()
    good = executor.ended
    inner.failure = RuntimeError("gone")
    with pytest.raises(RuntimeError, match="gone"):
        driver.step()
    assert executor.ended is good


def test_processes_are_those_of_the_inner_executor() -> None:
    inner = FakeExecutor(resolved_config())
    assert WatchedExecutor(inner, Ticks()).pids == ()
    inner.pids = (11, 12)  # type: ignore[attr-defined]
    assert WatchedExecutor(inner, Ticks()).pids == (11, 12)
