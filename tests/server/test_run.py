"""One run of a server, from an open port to a closed one, whatever happens between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from heddle.config import EngineConfig
from heddle.engine.async_llm import AsyncLLM
from heddle.errors import ModelFileError, NumericsError, RankFailed
from heddle.server import run as module
from heddle.server.config import ServerConfig
from heddle.server.guard import KeyRing
from heddle.server.listening import bind, url_of
from heddle.server.run import Server
from heddle.server.serving import Phase, Serving
from tests.support.toy_engine import ToyLLM

LIMIT = 60.0
PROMPT = {"prompt": [3, 4], "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Started:
    """A server in this event loop, its client, and what it has said."""

    def __init__(self, load: Callable[[], Any], **settings: Any) -> None:
        config = ServerConfig(port=0, **settings)
        self.said: list[str] = []
        self.ready: list[str] = []
        self.serving = Serving(config, "toy")
        self._listener = bind(config)
        self.port = self._listener.getsockname()[1]
        self.url = url_of(config, self._listener)
        self.server = Server(
            load,
            EngineConfig(model="toy"),
            self.serving,
            KeyRing(()),
            self._listener,
            on_ready=lambda _, url: self.ready.append(url),
            say=self.said.append,
        )
        self.ended = asyncio.ensure_future(self.server.run())
        self.client = httpx2.AsyncClient(base_url=self.url, timeout=LIMIT)

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            assert not self.ended.done(), self.ended
            await asyncio.sleep(0.002)

    async def is_closed(self) -> bool:
        """Nobody listens on its port."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    async def close(self) -> None:
        self.server.stop()
        self.server.stop()
        await asyncio.wait({self.ended})
        await self.client.aclose()
        self._listener.close()


def run(
    body: Callable[[Started], Awaitable[None]], load: Callable[[], Any], **settings: Any
) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT):
            started = Started(load, **settings)
            try:
                await body(started)
            finally:
                await started.close()

    asyncio.run(bounded())


class Loaded:
    """A load that can be held up; its ranks may fail at once."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self._failure = failure
        self.may_end = threading.Event()
        self.may_end.set()
        self.has_begun = threading.Event()
        self.llm: ToyLLM

    def load(self, watch: Any, on_plan: Any) -> ToyLLM:
        self.has_begun.set()
        assert self.may_end.wait(LIMIT)
        self.llm = ToyLLM(watch=watch)
        self.llm.executor.failure = self._failure
        return self.llm


def engine_of(started: Started) -> AsyncLLM:
    engine = started.serving.running_engine
    assert engine is not None
    return engine


def test_it_is_ready_once_and_ends_in_good_order() -> None:
    loaded = Loaded()

    async def body(started: Started) -> None:
        await started.until(lambda: started.ready)
        assert loaded.llm.executor.num_steps > 0, "it was warmed before"
        assert started.ready == [started.url]
        assert (await started.client.get("/ready")).status_code == 200
        answer = await started.client.post("/v1/completions", json={**PROMPT, "max_tokens": 3})
        assert answer.status_code == 200
        started.server.stop()
        assert await started.ended == 0
        assert await started.is_closed()
        assert started.said[-1] == "stopping: 0 open requests"
        assert loaded.llm.num_closed == 1

    run(body, loaded.load)


def test_probes_answer_while_the_model_loads() -> None:
    loaded = Loaded()
    loaded.may_end.clear()

    async def body(started: Started) -> None:
        try:
            await started.until(loaded.has_begun.is_set)
            for path in ("/health", "/ready"):
                answer = await started.client.get(path)
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
            refused = await started.client.post("/v1/completions", json=PROMPT)
            assert refused.json()["error"]["code"] == "engine_unavailable"
            assert started.ready == []
        finally:
            loaded.may_end.set()
        await started.until(lambda: started.ready)
        assert (await started.client.get("/health")).status_code == 200

    run(body, loaded.load)


@pytest.mark.parametrize(
    "error", [ModelFileError("weights are cut"), NumericsError("another number"), ValueError("x")]
)
def test_a_load_that_fails_ends_with_that_error_and_a_closed_port(error: Exception) -> None:
    def load(watch: Any, on_plan: Any) -> ToyLLM:
        raise error

    async def body(started: Started) -> None:
        with pytest.raises(type(error), match=str(error)):
            await started.ended
        assert await started.is_closed()
        assert started.ready == []

    run(body, load)


def test_a_warm_up_that_fails_ends_the_ranks_too() -> None:
    loaded = Loaded(RankFailed("rank 1 has no room"))

    async def body(started: Started) -> None:
        with pytest.raises(RankFailed, match="rank 1 has no room"):
            await started.ended
        assert await started.is_closed()
        assert loaded.llm.num_closed == 1
        assert started.ready == []

    run(body, loaded.load)


def test_a_stop_while_the_model_loads_waits_for_it_and_ends_the_ranks() -> None:
    loaded = Loaded()
    loaded.may_end.clear()

    async def body(started: Started) -> None:
        try:
            await started.until(loaded.has_begun.is_set)
            started.server.stop()
            await started.until(lambda: started.said[-1] == "stopping while the model loads")
            assert not started.ended.done()
            assert (await started.client.get("/ready")).status_code == 503
        finally:
            loaded.may_end.set()
        assert await started.ended == 0
        assert loaded.llm.num_closed == 1
        assert started.ready == []
        assert await started.is_closed()

    run(body, loaded.load)


def test_an_engine_that_fails_ends_the_server_with_its_reason() -> None:
    loaded = Loaded()

    async def body(started: Started) -> None:
        await started.until(lambda: started.ready)
        loaded.llm.executor.failure = RankFailed("rank 1 was killed")
        answer = await started.client.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 503
        assert await started.ended == 1
        assert started.serving.phase is Phase.FAILED
        assert "rank 1 was killed" in started.said[-1]
        assert await started.is_closed()
        assert loaded.llm.num_closed == 1

    run(body, loaded.load)


def test_open_requests_get_their_time_and_no_more() -> None:
    loaded = Loaded()

    async def body(started: Started) -> None:
        await started.until(lambda: started.ready)
        loaded.llm.executor.shut()
        stuck = asyncio.ensure_future(started.client.post("/v1/completions", json=PROMPT))
        await started.until(lambda: loaded.llm.driver.has_work)
        started.server.stop()
        await started.until(lambda: started.said[-1] == "stopping: 1 open request")
        await started.until(lambda: engine_of(started)._is_closed)  # its time is over
        assert not stuck.done()
        loaded.llm.executor.open()
        assert await started.ended == 0
        (outcome,) = await asyncio.gather(stuck, return_exceptions=True)
        assert isinstance(outcome, httpx2.HTTPError) or outcome.status_code == 503
        assert await started.is_closed()

    run(body, loaded.load, shutdown_timeout=0.05)


def test_a_second_stop_does_not_wait_for_open_requests() -> None:
    loaded = Loaded()

    async def body(started: Started) -> None:
        await started.until(lambda: started.ready)
        loaded.llm.executor.shut()
        stuck = asyncio.ensure_future(started.client.post("/v1/completions", json=PROMPT))
        await started.until(lambda: loaded.llm.driver.has_work)
        started.server.stop()
        await started.until(lambda: started.said[-1].startswith("stopping"))
        started.server.stop()
        await started.until(lambda: engine_of(started)._is_closed)
        loaded.llm.executor.open()
        assert await started.ended == 0
        await asyncio.gather(stuck, return_exceptions=True)

    run(body, loaded.load, shutdown_timeout=10**6)


def test_a_listener_that_breaks_is_no_good_end() -> None:
    loaded = Loaded()

    async def body(started: Started) -> None:
        with pytest.raises(ZeroDivisionError, match="inside"):
            await started.ended
        assert loaded.llm.num_closed == 1

    async def breaks(self: object, sockets: object) -> None:
        raise ZeroDivisionError("inside")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.HttpServer, "serve", breaks)
        run(body, loaded.load)
