"""A canary goes through every idle rank, and leaves no trace but in what ranks have done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from heddle.config import ParallelConfig
from heddle.engine.async_llm import AsyncLLM
from heddle.engine.recovery.canary import FIRST_ID
from heddle.errors import HeddleError
from heddle.scheduler.request import RequestStatus
from heddle.server.metrics import Metrics
from tests.engine.test_driver_replicas import MOE
from tests.support.toy_engine import (
    GatedExecutor,
    ToyLLM,
    assert_empty,
    continued,
    greedy,
    ids_of,
    run_engine,
    submit,
    until,
)


def layout(*, dp: int = 1, pp: int = 1, pcp: int = 1, lockstep: bool = False) -> dict[str, Any]:
    parallel = ParallelConfig(
        data_parallel_size=dp,
        pipeline_parallel_size=pp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=pcp,
        enable_expert_parallel=lockstep,
    )
    return {"parallel": parallel, "moe": MOE if lockstep else None}


LAYOUTS = {
    "one rank": layout(),
    "4 ranks": layout(pcp=4),
    "2 replicas": layout(dp=2),
    "2 stages": layout(pp=2),
    "3 replicas of 2 stages": layout(dp=3, pp=2),
    "2 replicas in lockstep": layout(dp=2, lockstep=True),
}


class Watched:
    """An engine, its metrics, and its canaries; time stands still unless it is moved."""

    def __init__(self, engine: AsyncLLM, llm: ToyLLM, metrics: Metrics, clock: Clock) -> None:
        self.engine, self.llm, self.metrics, self.clock = engine, llm, metrics, clock

    @property
    def executor(self) -> GatedExecutor:
        return self.llm.executor

    async def prove(self) -> None:
        """Until it is proven from now on."""
        since = self.clock.now = self.clock.now + 1.0
        while not await self.engine.call(lambda: self.metrics.canaries.prove(since)):
            await asyncio.sleep(0.001)
        assert self.metrics.canaries.proven() == since

    def canary_rounds(self) -> list[list[int]]:
        """Replicas that were given a canary, for each round with one."""
        rounds = [
            [
                index
                for index, (batch, _) in sorted(given.items())
                if any(request.request_id >= FIRST_ID for request in batch.requests)
            ]
            for given in self.executor.rounds
        ]
        return [found for found in rounds if found]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_watched(test: Callable[[Watched], Any], **config: Any) -> None:
    clock = Clock()
    metrics = Metrics("toy", clock=clock)

    async def body(engine: AsyncLLM, llm: ToyLLM) -> None:
        await engine.call(lambda: metrics.attach(llm))  # type: ignore[arg-type]
        await test(Watched(engine, llm, metrics, clock))

    run_engine(body, watch=metrics.watch_executor, on_step=metrics.on_step, **config)


def shown(metrics: Metrics) -> str:
    """All but what ranks say of themselves, and their blocks: one stays cached, free to go."""
    hidden = ("heddle:rank_", "heddle:kv_blocks", "heddle:measured_bytes")
    lines = metrics.render().decode().splitlines()
    kept = [line for line in lines if not line.startswith(hidden)]
    assert len(kept) > 300
    return "\n".join(kept)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_idle_rank_answers_and_nothing_is_counted(name: str) -> None:
    async def test(watched: Watched) -> None:
        before, totals = shown(watched.metrics), watched.llm.driver.counters.totals()
        for _ in range(3):
            await watched.prove()
        every = list(range(len(watched.llm.driver.replicas)))
        assert watched.canary_rounds() == [every] * 3
        assert shown(watched.metrics) == before
        assert watched.llm.driver.counters.totals() == totals
        assert watched.metrics.totals.num_steps == 0
        assert all(replica.load == 0 for replica in watched.llm.driver.replicas)
        assert_empty(watched.llm)
        step, text = watched.executor.collected[-1][1], watched.metrics.render().decode()
        for index in every:
            for rank in watched.metrics.watch.ranks_of(index):
                labels = f'engine="{index}",model_name="toy",rank="{rank}"'
                assert f"heddle:rank_step{{{labels}}} {step:.1f}\n" in text
        assert await ids_of(submit(watched.engine, [3, 4])) == continued([3, 4], 8)

    run_watched(test, **LAYOUTS[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_replica_that_works_gets_none(name: str) -> None:
    async def test(watched: Watched) -> None:
        num_replicas = len(watched.llm.driver.replicas)
        prompts = [[5 + i, 6, 7] for i in range(num_replicas)]
        watched.executor.shut()
        streams = [submit(watched.engine, prompt, greedy(12)) for prompt in prompts]
        await until(lambda: watched.llm.driver.is_busy)
        proven = asyncio.ensure_future(watched.prove())
        watched.executor.open()
        await proven
        assert [await ids_of(stream) for stream in streams] == [
            continued(prompt, 12) for prompt in prompts
        ]
        assert watched.canary_rounds() == []

    run_watched(test, **LAYOUTS[name])


def test_an_idle_replica_beside_one_that_works_gets_one() -> None:
    async def test(watched: Watched) -> None:
        stream = submit(watched.engine, [5, 6, 7], greedy(100))
        await until(lambda: watched.executor.num_steps > 1)
        await watched.prove()
        assert watched.canary_rounds() == [[1]]
        assert await ids_of(stream) == continued([5, 6, 7], 100)
        assert_empty(watched.llm)
        text = watched.metrics.render().decode()
        assert 'heddle:generation_tokens_total{engine="0",model_name="toy"} 100.0' in text
        assert 'heddle:generation_tokens_total{engine="1",model_name="toy"} 0.0' in text
        assert 'heddle:steps_total{engine="1",how="eager",model_name="toy"} 0.0' in text

    run_watched(test, **layout(dp=2))


def test_a_step_that_has_ended_since_is_enough() -> None:
    async def test(watched: Watched) -> None:
        await ids_of(submit(watched.engine, [3]))
        canaries, now = watched.metrics.canaries, watched.clock.now
        assert await watched.engine.call(lambda: canaries.prove(now))
        assert watched.canary_rounds() == []

    run_watched(test)


def test_a_request_that_comes_meanwhile_is_served_and_counted_alone() -> None:
    async def test(watched: Watched) -> None:
        watched.executor.shut()
        proven = asyncio.ensure_future(watched.prove())
        await until(lambda: watched.executor.rounds)
        queues = watched.metrics.queues()
        assert (queues.num_running, queues.num_waiting) == (0, 0)
        assert watched.llm.driver.num_running == 1
        (canary,) = watched.metrics.canaries._open.values()
        assert canary.status is RequestStatus.RUNNING
        assert 'heddle:num_requests_running{engine="0",model_name="toy"} 0.0' in (
            watched.metrics.render().decode()
        )
        stream = submit(watched.engine, [3, 4])
        watched.executor.open()
        assert await ids_of(stream) == continued([3, 4], 8)
        await proven
        totals = watched.llm.driver.counters.totals()
        assert (totals["rows"], totals["generation_tokens"]) == (2 + 7, 8)

    run_watched(test)


def test_numbers_that_are_not_finite_are_told_and_the_engine_goes_on() -> None:
    async def test(watched: Watched) -> None:
        with pytest.raises(HeddleError, match="came to NaN or inf"):
            await watched.prove()
        assert await ids_of(submit(watched.engine, [3, 4])) == continued([3, 4], 8)
        assert 'corrupted_requests_total{engine="0",model_name="toy"} 0.0' in (
            watched.metrics.render().decode()
        )
        assert_empty(watched.llm)

    run_watched(test, is_poisoned=lambda tokens: list(tokens) == [1])
