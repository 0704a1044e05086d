"""Before anybody is served, ranks have run steps of every kind; nothing of it is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heddle.config import ParallelConfig
from heddle.engine.inputs import PromptInput
from heddle.errors import RankFailed, RequestError
from heddle.server.warmup import warm_up
from heddle.step.batch import GlobalBatch, ScheduledRequest
from tests.support.toy_engine import ToyLLM, greedy, toy_engine


def warm(fail: BaseException | None = None, **config: Any) -> ToyLLM:
    async def body() -> ToyLLM:
        async with toy_engine(**config) as (engine, llm):
            llm.executor.failure = fail
            await warm_up(engine)
            assert not llm.driver.has_work
            return llm

    return asyncio.run(body())


def kind_of(part: ScheduledRequest) -> str:
    """What a step does for one request."""
    if not part.samples:
        return "piece"
    if not part.num_computed_tokens:
        return "whole prompt"
    return "decode" if len(part.token_ids) == 1 else "last piece"


def kinds_of(batches: list[GlobalBatch]) -> list[set[str]]:
    return [{kind_of(part) for part in batch.requests} for batch in batches]


@pytest.mark.parametrize("budget", [8, 16, 32, 100])
def test_steps_of_every_kind_have_run(budget: int) -> None:
    kinds = kinds_of(warm(max_num_batched_tokens=budget).executor.batches)
    assert set.union(*kinds) == {"whole prompt", "piece", "last piece", "decode"}
    assert any("decode" in kind and len(kind) > 1 for kind in kinds), "none mixes them"
    assert {"decode"} in kinds


def test_a_window_below_the_budget_has_no_pieces() -> None:
    kinds = kinds_of(warm(max_num_batched_tokens=256, max_model_len=64).executor.batches)
    assert set.union(*kinds) == {"whole prompt", "decode"}


def test_every_rank_of_a_layout_takes_part() -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=2, prefill_context_parallel_size=2, decode_context_parallel_size=4
    )
    llm = warm(parallel=parallel)
    assert llm.executor.world_size == 4
    assert {"whole prompt", "piece", "decode"} <= set.union(*kinds_of(llm.executor.batches))


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_every_replica_runs_steps_of_every_kind(num_replicas: int) -> None:
    executor = warm(parallel=ParallelConfig(data_parallel_size=num_replicas)).executor
    found: dict[int, list[GlobalBatch]] = {}
    for steps in executor.rounds:
        for replica, (batch, _) in steps.items():
            found.setdefault(replica, []).append(batch)
    assert sorted(found) == list(range(num_replicas))
    for batches in found.values():
        kinds = kinds_of(batches)
        assert set.union(*kinds) == {"whole prompt", "piece", "last piece", "decode"}


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks"), [(2, 65), (4, 65), (5, 65), (13, 3), (256, 2), (256, 3)]
)
def test_small_windows_and_pools_are_warmed_too(max_model_len: int, num_blocks: int) -> None:
    llm = warm(max_model_len=max_model_len, num_blocks=num_blocks)
    assert len(llm.executor.batches) >= 1


def test_nothing_of_it_is_left() -> None:
    llm = warm()
    llm.driver.audit()
    cache = llm.driver.replicas[0].cache
    assert cache.num_available_blocks == cache.num_usable_blocks

    async def ask_again() -> list[int]:
        async with toy_engine() as (engine, _):
            await warm_up(engine)
            prompts = [
                PromptInput(token_ids=(1,) * 40, cache_salt=f"warm-up {number}")
                for number in range(3)
            ]
            return [
                output.num_cached_tokens
                for prompt in prompts
                async for output in engine.generate(prompt, greedy(1))
            ]

    assert asyncio.run(ask_again()) == [0, 0, 0]


def test_a_rank_that_fails_is_told() -> None:
    with pytest.raises(RankFailed, match="rank 3"):
        warm(RankFailed("rank 3 has no room"))


def test_a_model_that_gives_no_numbers_is_told() -> None:
    with pytest.raises(RequestError, match="no usable numbers"):
        warm(is_poisoned=lambda tokens: len(tokens) > 10)
