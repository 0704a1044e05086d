"""An honest beginning, an honest end, and a source that is always closed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.server.errors import ApiError
from heddle.server.sse import DONE, HEADERS, EventStream, event, send_error

LIMIT = 60.0
ERROR = ApiError("it broke", "generation_failed")


class Reader:
    """A client: it takes what is sent, until it is told to leave or to stop reading."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.has_left = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.breaks = False

    async def receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.may_read.wait()
        if self.breaks:
            raise OSError("a broken pipe")
        self.messages.append(message)

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["type"] == "http.response.start"]

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.messages if m["type"] == "http.response.body")

    @property
    def is_complete(self) -> bool:
        """The last message ends the body, and none before it does."""
        flags = [
            message.get("more_body", False)
            for message in self.messages
            if message["type"] == "http.response.body"
        ]
        return bool(flags) and not flags[-1] and all(flags[:-1])

    @property
    def num_comments(self) -> int:
        return sum(m.get("body", b"").startswith(b":") for m in self.messages)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)


class Source:
    """Steps of a stream: bytes to send, an error to raise, or something to wait for."""

    def __init__(self, *steps: bytes | Exception | Callable[[], Any]) -> None:
        self._steps = steps
        self.has_begun = self.has_ended = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        self.has_begun = True
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, bytes):
                    yield step
                else:
                    await step()
        finally:
            await asyncio.sleep(0)  # as a source that waits for its requests to end
            self.has_ended = True


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def stream(source: Source, **options: Any) -> EventStream:
    given: dict[str, Any] = {
        "comment": lambda: "prefill 1/2",
        "on_error": lambda error: ERROR,
        "keep_alive_seconds": 0.0,
        "stall_seconds": 0.0,
    }
    return EventStream(source.events(), **{**given, **options})


def run(body: Callable[[Reader], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT):
            await body(Reader())

    asyncio.run(bounded())


async def send_all(reader: Reader, source: Source, **options: Any) -> None:
    await stream(source, **options)({}, reader.receive, reader.send)


def test_events_come_whole_and_in_order() -> None:
    async def body(reader: Reader) -> None:
        source = Source(b"data: 1\n\n", b"data: 2\n\n", DONE)
        await send_all(reader, source, headers={"x-more": "yes"})
        (start,) = reader.starts
        assert start["status"] == 200
        headers = {k.decode(): v.decode() for k, v in start["headers"]}
        assert headers == {**HEADERS, "x-more": "yes"}
        assert reader.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        assert reader.is_complete
        assert source.has_ended

    run(body)


def test_nothing_is_promised_before_the_first_event() -> None:
    async def body(reader: Reader) -> None:
        goes_on = asyncio.Event()
        source = Source(goes_on.wait, b"data: 1\n\n")
        task = asyncio.ensure_future(send_all(reader, source))
        await reader.until(lambda: source.has_begun)
        await asyncio.sleep(0.01)
        assert reader.messages == []
        goes_on.set()
        await task
        assert reader.body == b"data: 1\n\n"

    run(body)


def test_a_failure_before_the_first_event_is_a_plain_error() -> None:
    async def body(reader: Reader) -> None:
        source = Source(ValueError("inside"))
        seen: list[Exception] = []

        def explain(error: Exception) -> ApiError:
            seen.append(error)
            return ERROR

        await send_all(reader, source, on_error=explain)
        (start,) = reader.starts
        assert start["status"] == 500
        headers = dict(start["headers"])
        assert headers[b"content-type"] == b"application/json"
        assert headers[b"x-should-retry"] == b"false"
        assert int(headers[b"content-length"]) == len(reader.body)
        assert json.loads(reader.body) == ERROR.body()
        assert reader.is_complete
        assert [str(error) for error in seen] == ["inside"]

    run(body)


def test_a_failure_afterwards_is_an_event_and_no_end_follows() -> None:
    async def body(reader: Reader) -> None:
        source = Source(b"data: 1\n\n", ValueError("inside"), DONE)
        await send_all(reader, source)
        assert [start["status"] for start in reader.starts] == [200]
        first, second, rest = reader.body.split(b"\n\n")
        assert (first, rest) == (b"data: 1", b"")
        assert json.loads(second.removeprefix(b"data: ")) == ERROR.body()
        assert reader.is_complete
        assert source.has_ended

    run(body)


def test_a_silence_is_filled_with_comments_and_loses_nothing() -> None:
    async def body(reader: Reader) -> None:
        told = iter(["prefill 1/2", "d\u00e9coding", *["later"] * 10**6])
        source = Source(
            lambda: reader.until(lambda: reader.num_comments >= 2),
            b"data: 1\n\n",
            lambda: reader.until(lambda: reader.num_comments >= 3),
            b"data: 2\n\n",
        )
        await send_all(reader, source, keep_alive_seconds=0.005, comment=lambda: next(told))
        blocks = reader.body.split(b"\n\n")
        assert blocks[:2] == [b": prefill 1/2", b": d?coding"]
        assert [block for block in blocks if block.startswith(b"data")] == [b"data: 1", b"data: 2"]
        assert all(block.startswith((b":", b"data")) for block in blocks[:-1])
        assert len(reader.starts) == 1

    run(body)


def test_a_comment_commits_to_a_stream() -> None:
    async def body(reader: Reader) -> None:
        source = Source(lambda: reader.until(lambda: reader.num_comments >= 1), ValueError("late"))
        await send_all(reader, source, keep_alive_seconds=0.005)
        assert [start["status"] for start in reader.starts] == [200]
        assert b'data: {"error":' in reader.body

    run(body)


def test_no_interval_means_no_comments() -> None:
    async def body(reader: Reader) -> None:
        await send_all(reader, Source(lambda: asyncio.sleep(0.03), b"data: 1\n\n"))
        assert reader.num_comments == 0

    run(body)


@pytest.mark.parametrize("keep_alive_seconds", [0.0, 0.005])
def test_a_reader_that_takes_nothing_is_cut_and_the_source_closed(
    keep_alive_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(reader: Reader) -> None:
        async def stop_reading() -> None:
            await reader.until(lambda: reader.body.startswith(b"data: 1"))
            reader.may_read.clear()

        source = Source(b"data: 1\n\n", stop_reading, b"data: 2\n\n", forever)
        with caplog.at_level(logging.INFO, "heddle.server"):
            await send_all(
                reader, source, stall_seconds=0.02, keep_alive_seconds=keep_alive_seconds
            )
        assert "took nothing for 0.02 s" in caplog.text
        assert source.has_ended
        assert b"data: 2" not in reader.body
        assert not reader.is_complete, "it would look whole"

    run(body)


def test_without_a_limit_a_reader_may_take_its_time() -> None:
    async def body(reader: Reader) -> None:
        task = asyncio.ensure_future(send_all(reader, Source(b"data: 1\n\n", b"data: 2\n\n")))
        reader.may_read.clear()
        await asyncio.sleep(0.03)
        assert not task.done()
        reader.may_read.set()
        await task
        assert reader.body == b"data: 1\n\ndata: 2\n\n"

    run(body)


@pytest.mark.parametrize("steps", [(), (b"data: 1\n\n",)], ids=["silent", "begun"])
def test_a_client_that_leaves_closes_the_source(steps: tuple[bytes, ...]) -> None:
    async def body(reader: Reader) -> None:
        source = Source(*steps, forever)
        task = asyncio.ensure_future(send_all(reader, source))
        await reader.until(lambda: source.has_begun and reader.body == b"".join(steps))
        assert not source.has_ended
        reader.has_left.set()
        await task
        assert source.has_ended
        assert not reader.is_complete

    run(body)


def test_a_client_that_has_left_before_closes_the_source() -> None:
    async def body(reader: Reader) -> None:
        reader.has_left.set()
        source = Source(b"data: 1\n\n", forever)
        await send_all(reader, source)
        assert source.has_begun == source.has_ended
        assert reader.messages == []

    run(body)


def test_a_connection_that_breaks_closes_the_source() -> None:
    async def body(reader: Reader) -> None:
        reader.breaks = True
        source = Source(b"data: 1\n\n", forever)
        with pytest.raises(OSError, match="broken pipe"):
            await send_all(reader, source)
        assert source.has_ended

    run(body)


def test_a_stream_that_is_cancelled_closes_the_source() -> None:
    async def body(reader: Reader) -> None:
        source = Source(b"data: 1\n\n", forever)
        task = asyncio.ensure_future(send_all(reader, source))
        await reader.until(lambda: reader.body == b"data: 1\n\n")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.has_ended

    run(body)


def test_an_error_of_low_level_has_the_headers_of_its_code() -> None:
    async def body(reader: Reader) -> None:
        await send_error(reader.send, ApiError("who", "invalid_api_key", headers={"X-A": "b"}))
        (start,) = reader.starts
        assert start["status"] == 401
        headers = dict(start["headers"])
        assert headers[b"www-authenticate"] == b"Bearer"
        assert headers[b"x-a"] == b"b"
        assert all(name == name.lower() for name in headers)

    run(body)


@given(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False)))
def test_an_event_is_two_ends_of_line_and_ascii(document: dict[str, Any]) -> None:
    data = event(document)
    assert data.isascii()
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert data.endswith(b"\n\n")
    assert json.loads(data.removeprefix(b"data: ")) == document


def test_an_event_with_what_json_cannot_write_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        event({"logprob": float("-inf")})
