"""What uvicorn alone lets pass: heads that never end. Real sockets, a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.server import http
from heddle.server.config import ServerConfig
from heddle.server.http import http_server
from heddle.server.listening import bind

HEAD_SECONDS = 0.15
LIMIT = 60.0
HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message["body"])
        more = message["more_body"]
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def listening(app: Any = echo, **limits: Any) -> AsyncIterator[Connect]:
    listener = bind(ServerConfig(port=0))
    server = http_server(app, keyfile="", certfile="", **limits)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writers.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        server.should_exit = True
        await task
        listener.close()


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", HEAD_SECONDS)


def run(body: Callable[[Connect], Awaitable[None]], **options: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT), listening(**options) as connect:
            await body(connect)

    asyncio.run(bounded())


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Body of one response."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    lines = dict(line.split(b": ", 1) for line in head.lower().strip().split(b"\r\n")[1:])
    return await reader.readexactly(int(lines[b"content-length"]))


async def drip_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a head that never ends, piece by piece; returns when the server has closed."""
    writer.write(HEAD)
    closed = asyncio.ensure_future(reader.read())
    while not closed.done():
        writer.write(b"X-A: b\r\n")
        await asyncio.wait({closed}, timeout=HEAD_SECONDS / 5)
    if isinstance(closed.exception(), ConnectionResetError):  # pieces were under way
        return
    assert closed.result() == b""


def test_a_head_that_drips_is_cut() -> None:
    async def body(connect: Connect) -> None:
        await drip_until_closed(*await connect())

    run(body)


def test_a_connection_that_says_nothing_is_cut() -> None:
    async def body(connect: Connect) -> None:
        reader, _ = await connect()
        assert await reader.read() == b""

    run(body)


def test_a_later_head_of_a_connection_is_cut_too() -> None:
    async def body(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(HEAD + b"\r\n")
        assert await answer(reader) == b"0"
        await drip_until_closed(reader, writer)

    run(body)


def test_an_idle_connection_stays_open_after_a_response() -> None:
    async def body(connect: Connect) -> None:
        reader, writer = await connect()
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert await answer(reader) == b"0"
            await asyncio.sleep(3 * HEAD_SECONDS)
        writer.write(HEAD + b"\r\n")
        assert await answer(reader) == b"0"

    run(body)


def test_a_slow_body_and_a_slow_answer_are_not_cut() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3 * HEAD_SECONDS)
        await echo(scope, receive, send)

    async def body(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n")
        for _ in range(4):
            await asyncio.sleep(HEAD_SECONDS)
            writer.write(b"x")
        assert await answer(reader) == b"4"

    run(body, app=slow)


def test_two_requests_at_once_are_both_answered_and_the_third_may_wait() -> None:
    async def body(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(HEAD + b"\r\n" + HEAD + b"\r\n")
        assert await answer(reader) == await answer(reader) == b"0"
        await asyncio.sleep(3 * HEAD_SECONDS)
        writer.write(HEAD + b"\r\n")
        assert await answer(reader) == b"0"

    run(body)


class Flood:
    """An application that writes more than any buffer holds."""

    SIZE = 32 << 20

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(self.SIZE).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        piece = {"type": "http.response.body", "body": bytes(1 << 20), "more_body": True}
        for _ in range(self.SIZE >> 20):
            await send(piece)
        await send({"type": "http.response.body", "body": b""})
        self.has_ended.set()


async def size_of(reader: asyncio.StreamReader) -> int:
    """Bytes until the end, or until the connection is reset."""
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(1 << 20):
            size += len(piece)
    return size


def test_a_reader_that_takes_nothing_is_cut() -> None:
    flood = Flood()

    async def body(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(HEAD + b"\r\n")
        await flood.has_ended.wait()  # what it wrote on has gone nowhere
        assert await size_of(reader) < Flood.SIZE

    run(body, app=flood, stall_seconds=0.1)


def test_a_reader_that_takes_everything_gets_it() -> None:
    async def body(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(HEAD + b"Connection: close\r\n\r\n")
        assert await size_of(reader) > Flood.SIZE

    run(body, app=Flood(), stall_seconds=30.0)


def test_the_connection_that_is_idle_for_longest_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", LIMIT)
    held = asyncio.Event()

    async def held_up(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await held.wait()
        await echo(scope, receive, send)

    async def body(connect: Connect) -> None:
        busy, asked = await connect()  # the oldest, but it has a request
        asked.write(HEAD.replace(b"/ ", b"/slow ") + b"\r\n")
        kept, writer = await connect()
        writer.write(HEAD + b"\r\n")
        assert await answer(kept) == b"0"  # idle since then
        silent = [(await connect())[0] for _ in range(20)]
        late, writer = await connect()
        writer.write(HEAD + b"\r\n")
        assert await answer(late) == b"0"
        with contextlib.suppress(ConnectionResetError):
            assert await kept.read() == b""
        ends = [asyncio.ensure_future(reader.read()) for reader in silent]
        await asyncio.wait(ends[:18])
        assert {type(end.exception()) for end in ends[:18]} <= {type(None), ConnectionResetError}
        assert not any(end.done() for end in ends[18:]), "four are left: busy, late and these"
        for end in ends[18:]:
            end.cancel()
        held.set()
        assert await answer(busy) == b"0"

    run(body, app=held_up, max_connections=4)


def test_a_connection_whose_next_request_has_come_is_not_idle() -> None:
    held = asyncio.Event()
    answered: list[str] = []

    async def second_waits(scope: Any, receive: Any, send: Any) -> None:
        if answered:
            await held.wait()
        answered.append(scope["path"])
        await echo(scope, receive, send)

    async def body(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write((HEAD + b"\r\n") * 2)
        assert await answer(reader) == b"0"
        for _ in range(5):
            await connect()
        held.set()
        assert await answer(reader) == b"0"

    run(body, app=second_waits, max_connections=2)


def test_no_header_names_the_server() -> None:
    async def body(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(HEAD + b"\r\n")
        assert b"\r\nserver:" not in (await reader.readuntil(b"\r\n\r\n")).lower()

    run(body)


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_certificate_that_cannot_be_read_is_a_matter_of_settings(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "certificate.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"certificate\.pem"):
        http_server(echo, keyfile=str(path), certfile=str(path))
