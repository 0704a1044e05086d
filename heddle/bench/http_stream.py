"""Answers of an OpenAI-shaped server, read as its rules say.

    stream: status 200 --> data: {...} --> data: {...} --> data: [DONE]      an answer
                 |              |               |___ the body ends           failed: unfinished
                 |              |___ data: {"error": ...}                    failed
                 |___ any other status                                       failed

A stream that ends without `[DONE]` may have lost its tail, so it counts as failed, however clean
its end. Comment lines are keep-alives. Lines end at LF or CRLF: other characters that Unicode calls
line ends may stand raw inside JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2

from heddle.errors import HeddleError

DONE = "[DONE]"
MAX_TOLD_CHARACTERS = 300
"""Of a body that is no JSON error, in a message."""


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
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Data of the events that this piece completes; an event without data is none."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found = []
        for line in lines:
            text = line.removesuffix(b"\r").decode("utf-8", errors="replace")
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                found.append("\n".join(self._data))
                self._data = []
        return found


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
                await response.aread()
                raise refusal(response)
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


def json_content(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body as arguments of a client's request: ASCII, so that any text can be sent, also one
    that is not legal Unicode, which the server judges.
    """
    return {
        "content": json.dumps(body, allow_nan=False).encode("ascii"),
        "headers": {"content-type": "application/json"},
    }


def refusal(response: httpx2.Response) -> AnswerFailed:
    """What a status that is not 200 says. The body must have been read."""
    message, code = _error_of(_json_or_none(response.content))
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
    try:
        event = json.loads(data)
    except ValueError:
        raise AnswerFailed("an event of the stream is not JSON") from None
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


def _json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
