"""An OpenAI-shaped server on loopback that behaves as the name of the model says.

    normal      three chunks, usage, [DONE]
    silent      the same without usage and without text
    slow        the same, a while between chunks
    busy-N      429 with Retry-After, N times per prompt; then normal
    refusing    400 with an error body
    crashing    500, not in JSON
    broken      an error event behind the first chunk
    cut         a clean end without [DONE]
    torn        the connection breaks behind the first chunk
    bytes       normal, one byte at a time, lines ended by CRLF, comments between them

Without `stream` the answer is one document: the prompt or the last message, upper case.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

PIECES = ("one ", "two\u2028", "thr\u00e9e")
SLOW_SECONDS = 0.05
TOKENS = [5, 6, 7, 9]


@dataclass
class FakeServer:
    """What it was asked, and how to reach it."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    most_open: int = 0
    has_tokenize: bool = True
    models: list[str] = field(default_factory=lambda: ["normal", "other"])
    num_loading: int = 0
    """Requests that are answered with 503 before any other."""

    async def __call__(self, scope, receive, send) -> None:
        """ASGI."""
        data = b""
        while True:
            message = await receive()
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = dict(scope["headers"])
        self.authorizations.add(headers.get(b"authorization", b"").decode())
        path = scope["path"]
        if self.num_loading:
            self.num_loading -= 1
            await answer(send, 503, {"error": {"message": "the model is loading"}})
        elif path == "/v1/models":
            await answer(send, 200, {"data": [{"id": name} for name in self.models]})
        elif path == "/tokenize" and self.has_tokenize:
            await answer(send, 200, {"tokens": TOKENS})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                await self.play(json.loads(data), path.endswith("/chat/completions"), send)
            finally:
                self.num_open -= 1
        else:
            await answer(send, 404, {"error": {"message": "no such path", "code": "not_found"}})

    async def play(self, body, is_chat: bool, send) -> None:
        """One request."""
        self.bodies.append(body)
        model = body["model"]
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        key = f"{model} {prompt}"
        self.asked[key] += 1
        if model == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        if model.startswith("busy-") and self.asked[key] <= int(model[5:]):
            error = {"message": "the queue is full", "code": "engine_overloaded"}
            await answer(send, 429, {"error": error}, [(b"retry-after", b"0")])
        elif model == "refusing":
            await answer(send, 400, {"error": {"message": "no such field", "code": "invalid"}})
        elif model == "crashing":
            raise ConnectionResetError("on purpose")
        elif not body.get("stream"):
            await answer(send, 200, whole(str(prompt).upper(), is_chat))
        else:
            await start(send, 200, b"text/event-stream; charset=utf-8")
            async for data in events(model, is_chat, bool(body.get("stream_options"))):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if model == "torn":
                raise ConnectionResetError("on purpose")
            await send({"type": "http.response.body", "body": b""})


async def events(model: str, is_chat: bool, wants_usage: bool) -> AsyncIterator[bytes]:
    """Bytes of a stream."""
    for data in [one async for one in plain_events(model, is_chat, wants_usage)]:
        if model == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        if model == "bytes":
            for byte in b": a comment\r\n\r\n" + data.replace(b"\n", b"\r\n"):
                yield bytes([byte])
        else:
            yield data


async def plain_events(model: str, is_chat: bool, wants_usage: bool) -> AsyncIterator[bytes]:
    if is_chat:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    for text in PIECES:
        shown = "" if model == "silent" else text
        part = {"delta": {"content": shown}} if is_chat else {"text": shown}
        yield event({"choices": [{"index": 0, "finish_reason": None, **part}]})
        if model == "broken":
            yield event({"error": {"message": "a rank died", "code": "engine_restarted"}})
            return
        if model == "torn":
            return
    last = {"delta": {}} if is_chat else {"text": ""}
    yield event({"choices": [{"index": 0, "finish_reason": "stop", **last}]})
    if wants_usage and model != "silent":
        yield event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}})
    if model != "cut":
        yield b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()


def whole(text: str, is_chat: bool) -> dict[str, Any]:
    part = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"id": "x", "choices": [{"index": 0, "finish_reason": "stop", **part}]}


async def start(send, status: int, kind: bytes, more=()) -> None:
    headers = [(b"content-type", kind), (b"x-request-id", b"fake-1"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def answer(send, status: int, document: dict[str, Any], more=()) -> None:
    await start(send, status, b"application/json", more)
    await send({"type": "http.response.body", "body": json.dumps(document).encode()})


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """A server in a thread, ended with the block."""
    fake = FakeServer()
    config = uvicorn.Config(
        fake, port=0, http="h11", ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(30)
