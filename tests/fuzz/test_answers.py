"""Hostile servers: what our own clients make of any bytes that come back."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx2
import pytest

from heddle.bench import http_stream
from heddle.bench.http_load import (
    CHAT,
    DEFAULT_VOCAB_SIZE,
    Load,
    first_model,
    timed_request,
    token_pool,
)
from heddle.bench.http_stream import (
    MAX_EVENT_BYTES,
    MAX_REFUSAL_BYTES,
    AnswerFailed,
    EventDecoder,
    stream_events,
)
from heddle.cli.chat_partners import RemotePartner
from heddle.cli.run_batch_client import run_lines
from heddle.cli.run_batch_files import BatchLine
from heddle.errors import HeddleError
from tests.support.mutations import HOSTILE, mutated_bytes, mutated_json, try_mutants

COUNT = 200
T = TypeVar("T")

CHUNK = {
    "id": "x",
    "choices": [{"index": 0, "finish_reason": None, "delta": {"content": "one "}}],
    "usage": {"prompt_tokens": 11, "completion_tokens": 4},
}
EVENTS = b": hello\n\n" + b"".join(
    f"data: {json.dumps(document)}\n\n".encode() for document in (CHUNK, CHUNK)
)
STREAM = EVENTS + b"data: [DONE]\n\n"


def text_of(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except ValueError:  # more digits than Python writes
        return b"1" * 5000


class Pieces(httpx2.AsyncByteStream):
    """A body in pieces, and how many of them were taken."""

    def __init__(self, piece: bytes, count: int) -> None:
        self._piece, self._count, self.num_taken = piece, count, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._count):
            self.num_taken += 1
            yield self._piece


def asked(
    ask: Callable[[httpx2.AsyncClient], Awaitable[T]],
    content: bytes | Pieces,
    status: int = 200,
    **headers: str,
) -> T:
    """What a client makes of one answer."""
    told = {"content-type": "text/event-stream"}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(request: httpx2.Request) -> httpx2.Response:
        if isinstance(content, Pieces):
            return httpx2.Response(status, headers=told, stream=content)
        return httpx2.Response(status, headers=told, content=content)

    async def body() -> T:
        transport = httpx2.MockTransport(answer)
        async with httpx2.AsyncClient(transport=transport, base_url="http://any") as client:
            return await ask(client)

    return asyncio.run(body())


async def chat(client: httpx2.AsyncClient) -> str:
    partner = RemotePartner(client, "any", {})
    found = [piece async for piece in partner.answer([{"role": "user", "content": "a"}])]
    assert all(isinstance(piece.text, str) for piece in found)
    assert all(isinstance(piece.num_tokens, int) for piece in found)
    return "".join(piece.text for piece in found)


async def timed(client: httpx2.AsyncClient) -> None:
    load = Load(endpoint=CHAT, model="any", prompts=["a"], output_len=4)
    record = await timed_request(client, load, 0, 0.0)
    assert record.output_tokens >= 0
    assert (record.error is None) == bool(record.chunks)


async def batch(client: httpx2.AsyncClient) -> list[Any]:
    written: list[Any] = []
    line = BatchLine(number=1, custom_id="a", url="/v1/completions", body={"prompt": "a"})
    await run_lines(client, [line], max_concurrency=1, max_retries=0, write=written.append)
    json.dumps(written, allow_nan=False)  # as the output file has it
    return written


def test_the_unharmed_stream_is_read() -> None:
    assert asked(chat, STREAM) == "one one "


def test_mutated_streams_are_answers_or_failures() -> None:
    def attempt(seed: int) -> None:
        asked(chat, mutated_bytes(STREAM, seed))

    found = try_mutants(range(COUNT), attempt)
    assert min(found.num_taken, found.num_refused) > COUNT // 10


@pytest.mark.parametrize("ask", [chat, timed])
def test_events_of_any_shape_are_answers_or_failures(ask: Any) -> None:
    def attempt(seed: int) -> None:
        event = text_of(mutated_json(CHUNK, seed))
        asked(ask, b"data: " + event + b"\n\ndata: [DONE]\n\n")

    found = try_mutants(range(COUNT), attempt)
    assert found.num_taken > COUNT // 10
    assert (found.num_refused > 0) == (ask is chat)  # a load keeps what fails


@pytest.mark.parametrize("status", [200, 400, 429, 500])
def test_documents_of_any_shape_become_a_line_of_a_batch(status: int) -> None:
    good = {"id": "x", "choices": [{"text": "A"}], "error": {"message": "no", "code": "c"}}
    num_objects: list[bool] = []

    def attempt(seed: int) -> None:
        content = text_of(mutated_json(good, seed))
        damaged = mutated_bytes(content, seed) if seed % 3 == 0 else content
        (line,) = asked(batch, damaged, status)
        is_object = isinstance(line["response"]["body"], dict)
        assert (line["error"] is None) == (status == 200 and is_object)
        num_objects.append(is_object)

    assert try_mutants(range(COUNT // 2), attempt).num_taken == COUNT // 2
    assert COUNT // 10 < sum(num_objects) < COUNT // 2


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a": NaN}', b"\xff", b"1" * 5000, b""])
def test_a_document_that_is_no_json_is_an_error_of_its_line(content: bytes) -> None:
    (line,) = asked(batch, content)
    assert line["error"]["code"] == "no_answer"
    with pytest.raises(AnswerFailed, match="not a JSON object"):
        asked(chat, b"data: " + (content or b"-") + b"\n\n")


@pytest.mark.parametrize("headers", [{"retry_after": "nan"}, {"retry_after_ms": "-5"}])
def test_a_pause_that_is_no_number_is_none(headers: dict[str, str]) -> None:
    (line,) = asked(batch, b"{}", 503, **headers)
    assert line["error"]["code"] == "status_503"


def test_lists_of_models_and_tokens_of_any_shape() -> None:
    def models(seed: int) -> None:
        document = mutated_json({"data": [{"id": "a"}, {"id": "b"}]}, seed)
        assert isinstance(asked(first_model, text_of(document)), str)

    def tokens(seed: int) -> None:
        document = mutated_json({"tokens": [5, 6, 7]}, seed)
        found = asked(lambda client: token_pool(client, "a"), text_of(document))
        assert all(type(token) is int and token >= 0 for token in found)

    assert try_mutants(range(COUNT), models, (HeddleError,)).num_taken > COUNT // 10
    assert try_mutants(range(COUNT), tokens, ()).num_taken == COUNT
    assert len(asked(lambda client: token_pool(client, "a"), b"{}")) == DEFAULT_VOCAB_SIZE


@pytest.mark.parametrize("piece", [b"x" * 65536, b"data: " + b"x" * 65536 + b"\n"])
def test_an_event_without_end_is_a_failure(piece: bytes) -> None:
    pieces = Pieces(piece, 10_000)

    async def ask(client: httpx2.AsyncClient) -> None:
        async for _ in stream_events(client, CHAT, {}):
            raise AssertionError("there is no event")

    with pytest.raises(AnswerFailed, match=f"more than {MAX_EVENT_BYTES} bytes"):
        asked(ask, pieces)
    assert pieces.num_taken <= 2 * MAX_EVENT_BYTES // len(piece) + 2


def test_a_document_without_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_stream, "MAX_ANSWER_BYTES", 1 << 20)
    pieces = Pieces(b" " * 65536, 10_000)
    (line,) = asked(batch, pieces)
    assert "more than 1048576 bytes" in line["error"]["message"]
    assert pieces.num_taken == 17
    packed = gzip.compress(b" " * (4 << 20))
    (line,) = asked(batch, packed, content_encoding="gzip")
    assert "more than 1048576 bytes" in line["error"]["message"]
    (line,) = asked(batch, b"no gzip", content_encoding="gzip")
    assert line["error"]["code"] == "no_answer"


def test_a_refusal_without_end_is_told_by_its_beginning() -> None:
    pieces = Pieces(b"x" * 65536, 10_000)
    with pytest.raises(AnswerFailed, match=r"status 500: x+$"):
        asked(chat, pieces, 500)
    assert pieces.num_taken <= MAX_REFUSAL_BYTES // 65536 + 2


def test_decoded_events_do_not_depend_on_how_the_bytes_came() -> None:
    def attempt(seed: int) -> None:
        stream = mutated_bytes(STREAM, seed)
        whole = EventDecoder().feed(stream)
        decoder = EventDecoder()
        assert [data for byte in stream for data in decoder.feed(bytes([byte]))] == whole

    assert try_mutants(range(COUNT), attempt, ()).num_taken == COUNT


def test_every_hostile_value_was_some_event() -> None:
    for value in HOSTILE:
        event = text_of({"choices": value, "usage": value, "error": None})
        found = try_mutants([0], lambda _, event=event: asked(chat, b"data: " + event + b"\n\n"))
        assert found.num_refused == 1, "it has no [DONE]"
