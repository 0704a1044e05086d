"""How requests and engines end before their time: who is told, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest

from heddle.engine.async_llm import AsyncLLM
from heddle.engine.outputs import RequestOutput
from heddle.errors import HeddleError, RankFailed, RequestError
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


def test_an_abort_right_behind_its_submit_leaves_nothing() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        held = submit(engine, [9], greedy(2))
        await until(lambda: llm.driver.has_work)
        stream = submit(engine, [3, 4], greedy(50))
        engine.abort(stream)
        llm.executor.open()
        await ids_of(held)
        (output,) = [output async for output in stream]
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        assert_empty(llm)

    run_engine(test)


def test_an_abort_in_mid_answer_ends_it_and_a_second_one_does_nothing() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        stream = submit(engine, [3, 4], greedy(200))
        first = await anext(stream)
        assert not first.finished
        engine.abort(stream)
        rest = [output async for output in stream]
        assert rest[-1].outputs[0].finish_reason == "abort"
        engine.abort(stream)
        tokens = [t for output in (first, *rest) for t in output.outputs[0].token_ids]
        assert tokens == continued([3, 4], 200)[: len(tokens)]
        await engine.call(lambda: assert_empty(llm))

    run_engine(test)


def test_an_abort_after_the_end_changes_nothing() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        stream = submit(engine, [3], greedy(3))
        assert await ids_of(stream) == continued([3], 3)
        engine.abort(stream)
        await engine.call(lambda: None)
        assert not stream._news.is_set()
        assert llm.driver.counters.totals()["requests_abort"] == 0

    run_engine(test)


def test_random_aborts_leave_nothing() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        async def visit(number: int) -> int:
            stream = submit(engine, [number % 50 + 2] * (number % 60 + 1), greedy(number % 30 + 1))
            seen = 0
            async for output in stream:
                seen += len(output.outputs[0].token_ids)
                if seen >= number % 11 and not output.finished:
                    break
            engine.abort(stream)
            return seen

        seen = await asyncio.gather(*(visit(number) for number in range(60)))
        assert sum(seen) > 60
        await engine.call(lambda: assert_empty(llm))
        assert engine._streams == engine._ids == {}
        assert engine._queued == set()

    run_engine(test, num_blocks=40)


def test_a_refused_request_is_told_and_others_go_on() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        good = submit(engine, [3], greedy(4))
        adapted = replace(good.prepared, adapter="nobody")
        bad = engine.submit(adapted)
        with pytest.raises(RequestError, match="nobody"):
            await anext(bad)
        assert [output async for output in bad] == []
        assert await ids_of(good) == continued([3], 4)
        engine.abort(bad)
        await engine.call(lambda: assert_empty(llm))

    run_engine(test)


def test_a_request_that_fails_ends_with_its_error_and_others_go_on() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        bad, good = submit(engine, [7] * 3), submit(engine, [8] * 3)
        *_, last = [output async for output in bad]
        assert last.error is not None
        assert last.error.code == "generation_failed"
        assert await ids_of(good) == continued([8] * 3, 8)
        assert engine.failure is None

    run_engine(test, is_poisoned=lambda tokens: tokens[0] == 7 and len(tokens) == 6)


def test_a_failed_engine_is_told_to_every_stream_and_takes_nothing_more() -> None:
    failure = RankFailed("rank 1 was killed")

    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        streams = [submit(engine, [number + 2], greedy(50)) for number in range(3)]
        await until(lambda: llm.driver.num_running + llm.driver.num_waiting > 0)
        late = submit(engine, [9], greedy(50))  # waits behind the step that fails
        called = asyncio.ensure_future(engine.call(llm.driver.step))
        await asyncio.sleep(0)
        llm.executor.failure = failure
        llm.executor.open()
        for stream in (*streams, late):
            with pytest.raises(RankFailed, match="rank 1 was killed"):
                await ids_of(stream)
        with pytest.raises(RankFailed, match="rank 1 was killed"):
            await called
        assert engine.failure is failure
        with pytest.raises(RankFailed, match="rank 1 was killed"):
            submit(engine, [2])
        with pytest.raises(RankFailed, match="rank 1 was killed"):
            await engine.call(lambda: None)
        await engine.close()
        assert llm.num_closed == 1

    run_engine(test)


def test_news_from_before_a_failure_are_read_first() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        stream = submit(engine, [3], greedy(50))
        llm.executor.let(3)
        await until(lambda: llm.executor.num_steps == 3)
        llm.executor.failure = RankFailed("gone")
        llm.executor.open()
        await until(lambda: engine.failure is not None)
        await asyncio.sleep(0)
        output = await anext(stream)
        assert list(output.outputs[0].token_ids) == continued([3], 3)
        with pytest.raises(RankFailed, match="gone"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run_engine(test)


def test_a_request_whose_admission_breaks_the_engine_is_told_too() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        def admit(*_: object, **__: object) -> str:
            raise ZeroDivisionError("a fault")

        llm.driver.admit = admit  # type: ignore[method-assign]
        stream = submit(engine, [3])
        with pytest.raises(ZeroDivisionError, match="a fault"):
            await anext(stream)
        assert isinstance(engine.failure, ZeroDivisionError)

    run_engine(test)


def test_what_is_submitted_behind_a_fault_of_the_caller_is_told_of_it() -> None:
    """Here the driver works still; its thread does not."""
    is_broken = threading.Event()

    def on_step(_: object) -> None:
        if is_broken.is_set():
            raise ZeroDivisionError("a fault of on_step")

    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        first = submit(engine, [3], greedy(50))
        await until(lambda: llm.driver.has_work)
        second = submit(engine, [4], greedy(50))
        is_broken.set()
        llm.executor.open()
        with pytest.raises(ZeroDivisionError, match="on_step"):
            await ids_of(first)
        with pytest.raises(HeddleError, match="on_step"):
            await ids_of(second)

    run_engine(test, on_step=on_step)


def test_a_rank_that_fails_inside_a_call_fails_the_engine() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        def load() -> None:
            raise RankFailed("rank 0 was killed")

        with pytest.raises(RankFailed, match="rank 0"):
            await engine.call(load)
        await until(lambda: engine.failure is not None)
        with pytest.raises(RankFailed, match="rank 0"):
            submit(engine, [2])

    run_engine(test)


def test_closing_ends_open_streams_and_the_ranks_once() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        stream = submit(engine, [3], greedy(100))
        await until(lambda: llm.driver.has_work)
        closing = [asyncio.ensure_future(engine.close()) for _ in range(2)]
        await asyncio.sleep(0)
        for refused in (lambda: submit(engine, [4]), lambda: engine.submit(stream.prepared)):
            with pytest.raises(HeddleError, match="closed"):
                refused()
        llm.executor.open()
        await asyncio.gather(*closing)
        with pytest.raises(HeddleError, match="closed"):
            await ids_of(stream)
        assert llm.num_closed == 1
        engine.abort(stream)

    run_engine(test)


def test_a_caller_who_gives_up_a_call_harms_nobody() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.shut()
        stream = submit(engine, [3], greedy(2))
        await until(lambda: llm.driver.has_work)
        called = asyncio.ensure_future(engine.call(lambda: 1))
        await asyncio.sleep(0)
        called.cancel()
        llm.executor.open()
        assert await ids_of(stream) == continued([3], 2)
        assert await engine.call(lambda: 2) == 2

    run_engine(test)


def test_leaving_a_generator_early_aborts_its_request() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        async with aclosing(engine.generate([3, 4], greedy(200))) as outputs:
            first = await anext(outputs)
            assert not first.finished
        await engine.call(lambda: assert_empty(llm))
        assert llm.driver.counters.totals()["requests_abort"] == 1

    run_engine(test)


def test_a_generator_raises_what_its_request_failed_of() -> None:
    async def test(engine: AsyncLLM, llm: ToyLLM) -> None:
        found: list[RequestOutput] = []

        async def read() -> None:
            async for output in engine.generate([7, 7], greedy(9)):
                found.append(output)

        with pytest.raises(RequestError, match="no usable numbers"):
            await read()
        assert sum(len(output.outputs[0].token_ids) for output in found) <= 3
        await engine.call(lambda: assert_empty(llm))

    run_engine(test, is_poisoned=lambda tokens: len(tokens) == 5)


def test_a_loop_that_ended_before_its_engine_harms_nobody() -> None:
    async def leave() -> tuple[AsyncLLM, ToyLLM]:
        llm = ToyLLM()
        engine = AsyncLLM(llm)  # type: ignore[arg-type]
        submit(engine, [3], greedy(100))
        return engine, llm

    engine, llm = asyncio.run(leave())
    asyncio.run(engine.close())
    assert engine.failure is None
    assert llm.num_closed == 1
