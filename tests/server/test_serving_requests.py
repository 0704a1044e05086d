"""The prompts of one HTTP request in the engine: all or none, in order, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from heddle.engine.async_llm import AsyncLLM
from heddle.errors import RankFailed
from heddle.server.caller import Caller
from heddle.server.errors import ApiError
from heddle.server.serving import Serving
from tests.support.offered import assert_no_tickets, run_serving, submit_job
from tests.support.toy_engine import ToyLLM, greedy


def test_all_prompts_of_a_request_come_back_in_order() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        job = await submit_job(serving, 40, 1, 9)
        assert serving.num_open == 1
        with job:
            outputs = await job.whole()
        assert [len(output.prompt_token_ids) for output in outputs] == [40, 1, 9]
        assert all(output.finished for output in outputs)
        assert serving.num_open == 0
        assert_no_tickets(serving)

    run_serving(body)


def test_one_bad_prompt_refuses_all_of_them() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        with pytest.raises(ApiError) as caught:
            await submit_job(serving, 3, 400, 3)
        assert caught.value.code == "context_length_exceeded"
        await engine.call(lambda: None)
        assert not llm.driver.has_work
        assert serving.num_open == 0
        assert_no_tickets(serving)

    run_serving(body)


def test_a_full_queue_takes_all_prompts_or_none() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        with await submit_job(serving, 3), pytest.raises(ApiError) as caught:
            await submit_job(serving, 3, 3, 3)
        assert caught.value.status == 429
        assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
        llm.executor.open()
        assert_no_tickets(serving)
        with await submit_job(serving, 3, 3) as job:
            assert len(await job.whole()) == 2
        assert llm.driver.counters.totals()["requests_length"] == 2

    run_serving(body, max_num_queued_reqs=2, max_num_seqs=1)


def test_a_prompt_whose_values_are_asked_for_has_a_length() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        params = greedy(1, prompt_logprobs=1)
        with pytest.raises(ApiError, match="at most 5 here") as caught:
            await submit_job(serving, 6, params=params)
        assert caught.value.param == "prompt_logprobs"
        with await submit_job(serving, 5, params=params) as job:
            (output,) = await job.whole()
        assert output.prompt_logprobs is not None
        with await submit_job(serving, 6) as job:
            await job.whole()

    run_serving(body, {"max_prompt_logprobs_tokens": 5})


def test_leaving_a_request_aborts_what_is_open() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        with await submit_job(serving, 3, 4, params=greedy(200)) as job:
            news = job.news()
            _, output = await anext(news)
            assert not output.finished
            await news.aclose()
        await engine.call(lambda: None)
        assert not llm.driver.has_work
        assert llm.driver.counters.totals()["requests_abort"] == 2
        assert_no_tickets(serving)

    run_serving(body)


def test_a_request_ends_at_its_time_limit() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        now = asyncio.get_running_loop().time()
        with (
            await submit_job(serving, 3, caller=Caller(deadline=now + 0.05)) as job,
            pytest.raises(ApiError) as caught,
        ):
            await job.whole()
        assert caught.value.code == "request_timeout"
        assert asyncio.get_running_loop().time() >= now + 0.05

    run_serving(body)


def test_an_answer_that_has_ended_is_told_once() -> None:
    """Answers of one request end at different steps; later news leave out those that have."""

    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        params = greedy(60, n=4, temperature=1.0, seed=3, ignore_eos=False)
        endings: list[int] = []
        tokens = 0
        with await submit_job(serving, 3, params=params) as job:
            async for _, output in job.news():
                tokens += sum(len(answer.token_ids) for answer in output.outputs)
                assert not {answer.index for answer in output.outputs} & set(endings)
                endings += [a.index for a in output.outputs if a.finish_reason is not None]
        assert sorted(endings) == [0, 1, 2, 3]
        assert tokens == llm.driver.counters.totals()["generation_tokens"]

    run_serving(body)


def test_a_failure_of_all_streams_is_told_once_and_leaves_no_noise() -> None:
    noise: list[Any] = []

    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        llm.executor.shut()
        with await submit_job(serving, 3, 4, 5) as job:
            waiting = asyncio.ensure_future(job.whole())
            while not llm.driver.has_work:
                await asyncio.sleep(0.001)
            llm.executor.failure = RankFailed("gone")
            llm.executor.open()
            with pytest.raises(RankFailed, match="gone"):
                await waiting

    run_serving(body)
    gc.collect()
    assert noise == []


def test_how_far_a_request_is_is_told_in_words() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        with await submit_job(serving, 40, params=greedy(3)) as job:
            with await submit_job(serving, 20, params=greedy(3)) as late:
                assert job.progress_text() == "prefill 0/40"
                for text in ("prefill 16/40", "prefill 32/40"):
                    llm.executor.let(1)
                    while job.progress_text() != text:
                        await asyncio.sleep(0.001)
                assert late.progress_text() == "waiting, 0 ahead"
            llm.executor.open()
            await job.whole()

    run_serving(body, max_num_batched_tokens=16, max_num_seqs=1)
