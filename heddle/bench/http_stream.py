"""Answers of an OpenAI-shaped server, read as its rules say.

    stream: status 200 --> data: {...} --> data: {...} --> data: [DONE]      an answer
                 |              |               |___ the body ends           failed: unfinished
                 |              |___ data: {"error": ...}                    failed
                 |___ any other status                                       failed

A stream that ends without `[DONE]` may have lost its tail, so it counts as failed, however clean
its end. Comment lines are keep-alives. Lines end at LF or CRLF: other characters that Unicode calls
line ends may stand raw inside JSON. A server is taken at its word in nothing: what it sends is
bounded, and whatever is not of the shape is a failed answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

import httpx2

from heddle.errors import HeddleError

DONE = "[DONE]"
MAX_TOLD_CHARACTERS = 300
"""Of a body that is no JSON error, in a message."""
MAX_EVENT_BYTES = 16 << 20
"""Of one event of a stream, whole or not."""
MAX_REFUSAL_BYTES = 1 << 20
"""Of an error body: what is beyond is not read."""
MAX_ANSWER_BYTES = 256 << 20
"""Of an answer that is one document."""
_OF_THE_BODY = ("content-encoding", "content-length", "transfer-encoding")
"""Headers that say how a body was sent, and do not hold for one that was read."""


class AnswerFailed(HeddleError):
    """A server gave no answer, or not the whole of one.

    Attributes:
        status: of HTTP; None: it did not get that far, or failed after a good status.
        code: word of the server for it; None: it gave none.
        headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.code = code
        self.headers: Mapping[str, str] = headers or {}
        super().__init__(message)


class EventDecoder:
    """Data of server-sent events, from bytes that come in pieces of any size.

    Example:
        >>> decoder = EventDecoder()
        >>> decoder.feed(b": waiting\\n\\ndata: {}"), decoder.feed(b"\\n\\n")
        ([], ['{}'])
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []
        self._num_waiting = 0  # bytes of the event that is not whole yet

    def feed(self, piece: bytes) -> list[str]:
        """Data of the events that this piece completes; an event without data is none.

        Raises:
            AnswerFailed: an event, or a line of it, does not end.
        """
        self._rest += piece
        found = []
        if b"\n" in piece:
            *lines, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
            for line in lines:
                found += self._take(line)
        if len(self._rest) + self._num_waiting > MAX_EVENT_BYTES:
            raise AnswerFailed(f"an event of the stream has more than {MAX_EVENT_BYTES} bytes")
        return found

    def _take(self, line: bytes) -> list[str]:
        """The event that a line ends, if it does."""
        text = line.removesuffix(b"\r").decode("utf-8", errors="replace")
        if text.startswith("data:"):
            self._data.append(text[5:].removeprefix(" "))
            self._num_waiting += len(line)
        elif not text and self._data:
            whole, self._data, self._num_waiting = "\n".join(self._data), [], 0
            return [whole]
        return []


async def stream_events(
    client: httpx2.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Ask for a stream and give its events, up to `[DONE]`.

    Args:
        client: knows the server and its key.
        path: of the endpoint.
        body: of the request, with `stream` true.
    Raises:
        AnswerFailed: it was refused, broke off, or ended without `[DONE]`.
    """
    try:
        async with client.stream("POST", path, **json_content(body)) as response:
            if response.status_code != 200:
                raise await _refusal_of(response)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise AnswerFailed("the server sent no event stream; does it stream on this path?")
            decoder = EventDecoder()
            async for piece in response.aiter_bytes():
                for data in decoder.feed(piece):
                    if data == DONE:
                        return
                    yield _event(data)
    except httpx2.HTTPError as error:
        raise AnswerFailed(transport_message(error)) from error
    raise AnswerFailed("the stream ended without [DONE]: its end may be missing")


async def whole_answer(
    client: httpx2.AsyncClient, method: str, path: str, **content: Any
) -> httpx2.Response:
    """An answer that is one document, read to its end.

    Args:
        client: knows the server and its key.
        method: of the request.
        path: of the endpoint.
        content: of `json_content`, or nothing.
    Raises:
        AnswerFailed: it has more than `MAX_ANSWER_BYTES`, also once unpacked.
        httpx2.HTTPError: the connection failed.
    """
    parts, size = [], 0
    async with client.stream(method, path, **content) as response:
        async for piece in response.aiter_bytes():
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise AnswerFailed(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
            parts.append(piece)
    return _as_read(response, b"".join(parts))


def json_content(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body as arguments of a client's request: ASCII, so that any text can be sent, also one
    that is not legal Unicode, which the server judges.
    """
    return {
        "content": json.dumps(body, allow_nan=False).encode("ascii"),
        "headers": {"content-type": "application/json"},
    }


async def _refusal_of(response: httpx2.Response) -> AnswerFailed:
    """As `refusal`, of an answer that was not read; of a long one the beginning."""
    told = b""
    async for piece in response.aiter_bytes():
        told += piece
        if len(told) > MAX_REFUSAL_BYTES:
            break
    return refusal(_as_read(response, told))


def _as_read(response: httpx2.Response, content: bytes) -> httpx2.Response:
    """The answer with its content, which was read from it piece by piece."""
    kept = [pair for pair in response.headers.multi_items() if pair[0] not in _OF_THE_BODY]
    return httpx2.Response(response.status_code, headers=kept, content=content)


def refusal(response: httpx2.Response) -> AnswerFailed:
    """What a status that is not 200 says. The body must have been read."""
    message, code = _error_of(json_or_none(response.content))
    told = message or response.text.strip()[:MAX_TOLD_CHARACTERS] or response.reason_phrase
    return AnswerFailed(
        f"status {response.status_code}: {told}",
        status=response.status_code,
        code=code,
        headers=response.headers,
    )


def transport_message(error: httpx2.HTTPError) -> str:
    """A failure below HTTP, in words; some of these exceptions have none of their own."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _event(data: str) -> dict[str, Any]:
    event = json_or_none(data)
    if not isinstance(event, dict):
        raise AnswerFailed("an event of the stream is not a JSON object")
    if event.get("error") is not None:
        message, code = _error_of(event)
        raise AnswerFailed(message or "the stream ended with an error", code=code)
    return event


def _error_of(document: Any) -> tuple[str, str | None]:
    """Message and code of an error body; some servers give a bare string, or `message` alone."""
    error = document.get("error", document) if isinstance(document, dict) else None
    if isinstance(error, str):
        return error, None
    if not isinstance(error, dict):
        return "", None
    code = error.get("code")
    return str(error.get("message") or ""), code if isinstance(code, str) else None


def json_or_none(content: bytes | str) -> Any:
    """The value of a JSON text; None also where it is none, or has numbers that JSON has not."""
    try:
        return json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
