"""A model on offer without HTTP: a `Serving` over the toy engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from heddle.config.sampling import SamplingParams
from heddle.engine.async_llm import AsyncLLM
from heddle.engine.inputs import PromptInput
from heddle.server.config import ServerConfig
from heddle.server.job import Job
from heddle.server.serving import Serving
from tests.support.toy_engine import ToyLLM, greedy, toy_engine

LIMIT = 60.0
Body = Callable[[Serving, AsyncLLM, ToyLLM], Awaitable[None]]


def run_serving(body: Body, settings: dict[str, Any] | None = None, **config: Any) -> None:
    """Run a test of a model that is ready.

    Args:
        body: the test.
        settings: of the server.
        config: of the engine.
    """

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT), toy_engine(**config) as (engine, llm):
            serving = Serving(ServerConfig(**(settings or {})), "toy")
            serving.begin(engine)
            await body(serving, engine, llm)

    asyncio.run(bounded())


async def submit_job(
    serving: Serving, *lengths: int, params: SamplingParams | None = None, **options: Any
) -> Job:
    """Queue prompts of these lengths, of different tokens."""
    prompts = [PromptInput(token_ids=(n + 2,) * length) for n, length in enumerate(lengths)]
    return await serving.submit(prompts, params or greedy(4), adapter=None, **options)


def assert_no_tickets(serving: Serving) -> None:
    """Its door counts nobody."""
    door = serving._door
    assert door is not None
    assert (door.num_open_requests, door.num_open_tokens) == (0, 0)
    assert (door.num_queued_requests, door.num_queued_tokens) == (0, 0)
