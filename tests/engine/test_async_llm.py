"""The engine in its thread: what streams say, and when."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.async_llm import AsyncLLM, Stream
from heddle.errors import PromptTooLong, RequestError
from tests.support.toy_engine import (
    ToyLLM,
    assert_empty,
    continued,
    greedy,
    ids_of,
    run_engine,
    submit,
    until,
)


def test_many_streams_at_once_say_what_the_model_says() -> None:
    prompts = [[number + 2] * (number % 7 + 1) for number in range(20)]

    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        found = await asyncio.gather(*(ids_of(submit(engine, prompt)) for prompt in prompts))
        assert found == [continued(prompt, 8) for prompt in prompts]
        assert_empty(llm)

    run_engine(test)


def test_a_reader_who_comes_late_gets_all_deltas_as_one() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        params = greedy(12, logprobs=1)
        late, prompt = submit(engine, [3, 4], params), submit(engine, [3, 4], params)
        deltas = [output async for output in prompt]
        assert len(deltas) > 1
        await until(lambda: not llm.driver.has_work)
        (whole,) = [output async for output in late]
        (answer,) = whole.outputs
        news = [output.outputs[0] for output in deltas]
        assert list(answer.token_ids) == [token for each in news for token in each.token_ids]
        assert list(answer.token_ids) == continued([3, 4], 12)
        assert answer.logprobs == tuple(p for each in news for p in each.logprobs or ())
        assert answer.finish_reason == news[-1].finish_reason == "length"

    run_engine(test)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_a_reader_who_comes_late_gets_no_token_twice(kind: RequestOutputKind) -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        stream = submit(engine, [3, 4], greedy(12, output_kind=kind))
        await until(lambda: stream._news.is_set() and not llm.driver.has_work)
        (whole,) = [output async for output in stream]
        assert list(whole.outputs[0].token_ids) == continued([3, 4], 12)

    run_engine(test)


def test_every_answer_of_a_request_is_merged_by_itself() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        params = greedy(6, n=3, temperature=1.0, seed=4)
        late, read = submit(engine, [5, 6], params), submit(engine, [5, 6], params)
        pieces: list[list[int]] = [[], [], []]
        async for output in read:
            for answer in output.outputs:
                pieces[answer.index] += answer.token_ids
        await until(lambda: not llm.driver.has_work)
        (whole,) = [output async for output in late]
        assert [list(answer.token_ids) for answer in whole.outputs] == pieces
        assert [len(piece) for piece in pieces] == [6, 6, 6]

    run_engine(test)


def test_an_engine_at_rest_runs_no_step() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        await ids_of(submit(engine, [3], greedy(2)))
        before = llm.executor.num_steps
        for _ in range(3):
            assert await engine.call(lambda: llm.executor.num_steps) == before

    run_engine(test)


def test_calls_run_in_the_thread_that_owns_the_driver() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        stream = submit(engine, [3], greedy(100))
        names = {await engine.call(lambda: threading.current_thread().name) for _ in range(5)}
        assert names == {"heddle-engine"}
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 // 0)
        assert await ids_of(stream) == continued([3], 100)
        assert engine.failure is None
        assert not llm.driver.has_work

    run_engine(test)


def test_a_generator_says_what_its_kind_says() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        expected = continued([3, 4], 5)
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        whole = [output async for output in engine.generate([3, 4], params)]
        lengths = [len(output.outputs[0].token_ids) for output in whole]
        assert lengths == sorted(set(lengths))
        assert list(whole[-1].outputs[0].token_ids) == expected
        deltas = [output async for output in engine.generate([3, 4], greedy(5))]
        assert [t for output in deltas for t in output.outputs[0].token_ids] == expected
        with pytest.raises(PromptTooLong):
            await anext(engine.generate([3] * 400, params))
        with pytest.raises(RequestError, match="a prompt is text"):
            await anext(engine.generate(5, params))
        assert_empty(llm)

    run_engine(test)


def test_a_request_is_said_to_start_when_it_leaves_the_queue() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        events: list[str] = []
        first, second = submit(engine, [3], greedy(4)), submit(engine, [4], greedy(4))
        first.on_start = lambda: events.append("first")
        second.on_start = lambda: events.append("second")
        llm.executor.let(2)
        await until(lambda: llm.executor.num_steps == 2 and bool(events))
        await asyncio.sleep(0)
        assert events == ["first"]
        assert second.progress is None or not second.progress.is_running
        llm.executor.open()
        await asyncio.gather(ids_of(first), ids_of(second))
        assert events == ["first", "second"]

    run_engine(test, max_num_seqs=1)


def test_progress_grows_to_the_whole_prompt() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        stream = submit(engine, [3] * 60, greedy(2))
        seen = []
        for step in range(1, 4):
            llm.executor.let(1)
            await until(lambda step=step: llm.executor.num_steps == step)  # type: ignore[misc]
            await engine_has_told(stream, 16 * step)
            assert stream.progress is not None
            seen.append((stream.progress.num_computed, stream.progress.num_total))
        assert seen == [(16, 60), (32, 60), (48, 60)]
        llm.executor.open()
        await ids_of(stream)

    run_engine(test, max_num_batched_tokens=16)


async def engine_has_told(stream: Stream, num_computed: int) -> None:
    await until(
        lambda: stream.progress is not None and stream.progress.num_computed >= num_computed
    )


def test_counters_are_read_in_the_thread_of_the_steps() -> None:
    seen: list[tuple[str, int]] = []

    def on_step(llm: Any) -> None:
        seen.append((threading.current_thread().name, llm.executor.num_steps))

    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        await ids_of(submit(engine, [3], greedy(4)))
        await engine.call(lambda: None)
        assert [name for name, _ in seen] == ["heddle-engine"] * 4
        assert [number for _, number in seen] == [1, 2, 3, 4]

    run_engine(test, on_step=on_step)
