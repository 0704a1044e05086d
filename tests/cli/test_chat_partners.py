from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from heddle.bench.http_stream import AnswerFailed
from heddle.cli.chat_partners import Piece, RemotePartner


def ask(*events, ends=True, sampling=None):
    """Pieces of a played stream, and the body that asked for it."""
    data = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
    bodies = []

    def answer(request):
        bodies.append(json.loads(request.content))
        kind = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=kind, text=data + "data: [DONE]\n\n" * ends)

    async def follow():
        transport = httpx2.MockTransport(answer)
        client = httpx2.AsyncClient(transport=transport, base_url="http://x")
        partner = RemotePartner(client, "m", sampling or {})
        try:
            return [piece async for piece in partner.answer([{"role": "user", "content": "u"}])]
        finally:
            await partner.close()
            assert client.is_closed

    return asyncio.run(follow()), bodies[0]


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields}]}


def test_reasoning_and_answer_are_told_apart_and_usage_has_the_last_word_on_tokens():
    usage = {"choices": [], "usage": {"completion_tokens": 9}}
    pieces, body = ask(
        delta(role="assistant"),
        delta(reasoning_content="hm"),
        delta(reasoning="so", content="a"),
        delta(content="b"),
        {"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}], "usage": None},
        usage,
        sampling={"temperature": 0.5},
    )
    assert pieces == [
        Piece("hm", 1, is_reasoning=True),
        Piece("so", 2, is_reasoning=True),
        Piece("a", 2),
        Piece("b", 3),
        Piece("", 9),
    ]
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "u"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }


def test_an_unfinished_stream_fails_behind_what_came():
    with pytest.raises(AnswerFailed, match=r"without \[DONE\]"):
        ask(delta(content="a"), ends=False)
