"""Real steps through every rank before anybody is served."""

from __future__ import annotations

import asyncio

from heddle.config.sampling import SamplingParams
from heddle.engine.async_llm import AsyncLLM, Stream
from heddle.engine.inputs import PromptInput

NUM_TOKENS = 4


async def warm_up(engine: AsyncLLM) -> None:
    """Run a whole prefill, a chunked one, decodes, and steps that mix them, on every replica.

    Raises:
        HeddleError: a step failed.
    """
    plan = engine.llm.plan
    replicas = engine.driver.replicas
    chunk = plan.scheduler.max_num_batched_tokens
    longest = min(plan.scheduler.max_model_len, replicas[0].cache.usable_tokens) - NUM_TOKENS
    short, long = min(8, longest), min(chunk + chunk // 2, longest)
    # Dealt by load, so as many of each length as there are replicas reach all of them.
    lengths = [length for length in (short, long, short) for _ in replicas]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prepared = await asyncio.to_thread(
        lambda: [
            engine.prepare(_prompt(number, length), params) for number, length in enumerate(lengths)
        ]
    )
    streams = [engine.submit(each) for each in prepared]  # at once, so that their steps mix
    try:
        await asyncio.gather(*map(_read, streams))
    finally:
        for stream in streams:
            engine.abort(stream)
    await engine.call(engine.driver.reset_prefix_cache)


def _prompt(number: int, length: int) -> PromptInput:
    """The salt lets none of them skip what another has computed."""
    return PromptInput(token_ids=(1,) * max(length, 1), cache_salt=f"warm-up {number}")


async def _read(stream: Stream) -> None:
    async for output in stream:
        if output.error is not None:
            raise output.error
