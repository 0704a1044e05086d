"""Real steps through every rank before anybody is served."""

from __future__ import annotations

import asyncio

from heddle.config.sampling import SamplingParams
from heddle.engine.async_llm import AsyncLLM

NUM_TOKENS = 4


async def warm_up(engine: AsyncLLM) -> None:
    """Run a whole prefill, a chunked one, decodes, and steps that mix them.

    Raises:
        HeddleError: a step failed.
    """
    plan = engine.llm.plan
    chunk = plan.scheduler.max_num_batched_tokens
    usable = engine.driver.replicas[0].cache.usable_tokens
    longest = min(plan.scheduler.max_model_len, usable) - NUM_TOKENS
    short, long = min(8, longest), min(chunk + chunk // 2, longest)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    await asyncio.gather(*(_run(engine, length, params) for length in (short, long, short)))
    await engine.call(engine.driver.reset_prefix_cache)


async def _run(engine: AsyncLLM, length: int, params: SamplingParams) -> None:
    async for _ in engine.generate([1] * max(length, 1), params):
        pass
