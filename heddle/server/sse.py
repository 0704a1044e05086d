"""Server-sent events, with an honest beginning and an honest end.

    nothing sent yet        a failure is a plain HTTP error with its own status
    first event or comment  status 200
    afterwards              a failure is an error event, and no [DONE] follows

A comment line is sent after a silence. A reader that takes nothing for too long, or has gone, ends
the source, which aborts its requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from heddle.server.errors import ApiError

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
log = logging.getLogger("heddle.server")
DONE = b"data: [DONE]\n\n"


class ReaderStalled(Exception):
    """The reader took nothing for too long; its connection is cut, not closed in good order."""


def event(document: Mapping[str, Any]) -> bytes:
    """One event. Pure ASCII: some readers take U+2028 and its like for the end of a line."""
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n".encode("ascii")


class EventStream:
    """An ASGI answer."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        comment: Callable[[], str],
        on_error: Callable[[Exception], ApiError],
        keep_alive_seconds: float,
        stall_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a source.

        Args:
            events: whole events; closed when nobody reads them any more.
            comment: text of a comment line.
            on_error: what a client is told of an exception of the source.
            keep_alive_seconds: silence before a comment; 0: never.
            stall_seconds: longest wait for a reader; 0: forever.
            headers: of the answer.
        """
        self._events = events
        self._comment = comment
        self._on_error = on_error
        self._keep_alive = keep_alive_seconds or None
        self._stall = stall_seconds or None
        self._headers = {**HEADERS, **(headers or {})}
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, while somebody reads."""
        del scope
        gone = asyncio.ensure_future(wait_until_gone(receive))
        try:
            await self._run(send, gone)
        except ReaderStalled as stalled:
            log.info("a stream is cut: %s", stalled)  # unfinished, so the connection is cut too
        finally:
            gone.cancel()
            await self._events.aclose()

    async def _run(self, send: Send, gone: asyncio.Future[None]) -> None:
        following: asyncio.Future[bytes] | None = None
        try:
            while True:
                following = following or asyncio.ensure_future(anext(self._events))
                either: set[asyncio.Future[Any]] = {following, gone}
                await asyncio.wait(
                    either, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    return
                if not following.done():
                    await self._send(send, f": {self._comment()}\n\n".encode("ascii", "replace"))
                    continue
                done, following = following, None
                try:
                    data = done.result()
                except StopAsyncIteration:
                    break
                except Exception as error:
                    await self._tell(send, self._on_error(error))
                    return
                await self._send(send, data)
            await self._send(send, b"", is_last=True)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait({following})

    async def _tell(self, send: Send, error: ApiError) -> None:
        if self._has_begun:
            await self._send(send, event(error.body()), is_last=True)
        else:
            await send_error(send, error)

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        try:
            async with asyncio.timeout(self._stall):
                await send(message)
        except TimeoutError:
            raise ReaderStalled(f"a reader took nothing for {self._stall:g} s") from None


async def send_error(send: Send, error: ApiError) -> None:
    """A whole error answer, below the framework."""
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    pairs = [
        (k.lower().encode("latin-1"), v.encode("latin-1"))
        for k, v in {**headers, **error.headers}.items()
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def wait_until_gone(receive: Receive) -> None:
    """Return when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
