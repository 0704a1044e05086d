from __future__ import annotations

import asyncio

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.bench.http_load import create_client
from heddle.bench.http_stream import AnswerFailed, EventDecoder, refusal, stream_events
from tests.support.fake_openai import PIECES, fake_server

TEXTS = st.lists(
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1),
    min_size=1,
    max_size=5,
)


@given(TEXTS, st.sampled_from(["\n", "\r\n"]), st.randoms(use_true_random=False), st.booleans())
def test_events_do_not_depend_on_where_bytes_are_cut(texts, line_end, random, has_comments):
    comment = f": waiting{line_end}{line_end}" if has_comments else ""
    data = "".join(f"{comment}data: {text}{line_end}{line_end}" for text in texts).encode()
    cuts = sorted(random.choices(range(len(data) + 1), k=random.randrange(6)))
    decoder = EventDecoder()
    found = [
        each
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
        for each in decoder.feed(data[begin:end])
    ]
    assert found == texts


def test_data_of_several_lines_is_one_event_and_other_fields_are_none():
    decoder = EventDecoder()
    assert decoder.feed(b"event: x\nid: 7\ndata: a\ndata:b\n\n\n\nretry: 1\n\n") == ["a\nb"]
    assert decoder.feed(b"data: half") == []
    assert decoder.feed(b"\r") == []
    assert decoder.feed(b"\n\r\n") == ["half"]


def read(url, model, path="/v1/completions"):
    async def follow():
        body = {"model": model, "prompt": "p", "messages": [{"content": "p"}], "stream": True}
        found = []
        async with create_client(url) as client:
            try:
                async for event in stream_events(client, path, body):
                    found.append(event)
            except AnswerFailed as failure:
                return found, failure
        return found, None

    return asyncio.run(follow())


@pytest.fixture(scope="module")
def fake():
    with fake_server() as server:
        yield server


@pytest.mark.parametrize("model", ["normal", "slow", "bytes"])
def test_a_whole_stream_gives_its_events(fake, model):
    events, failure = read(fake.url, model)
    assert failure is None
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(PIECES)


@pytest.mark.parametrize(
    ("model", "num_events", "message", "code"),
    [
        ("cut", 4, "without [DONE]", None),
        ("broken", 1, "a rank died", "engine_restarted"),
        ("torn", 1, "RemoteProtocolError", None),
    ],
)
def test_a_stream_that_did_not_finish_is_a_failure(fake, model, num_events, message, code):
    events, failure = read(fake.url, model)
    assert len(events) == num_events
    assert message in str(failure)
    assert (failure.status, failure.code) == (None, code)


def test_a_refusal_has_status_code_and_headers(fake):
    events, failure = read(fake.url, "busy-99")
    assert events == []
    assert str(failure) == "status 429: the queue is full"
    assert (failure.status, failure.code) == (429, "engine_overloaded")
    assert failure.headers["retry-after"] == "0"
    _, failure = read(fake.url, "normal", "/v1/nowhere")
    assert (failure.status, failure.code) == (404, "not_found")


def test_an_answer_of_another_kind_and_no_server_are_failures(fake):
    _, failure = read(fake.url, "normal", "/v1/models")
    assert "no event stream" in str(failure)
    _, failure = read("http://127.0.0.1:1", "normal")
    assert str(failure).startswith("ConnectError")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": "a bare word"}', "a bare word"),
        (b'{"message": "at the top"}', "at the top"),
        (b"<html>" + b"x" * 999, "<html>" + "x" * 294),
        (b"", "Bad Gateway"),
        (b"[1]", "[1]"),
    ],
    ids=["string", "top", "html", "empty", "list"],
)
def test_any_body_of_a_refusal_becomes_a_message(content, message):
    failure = refusal(httpx2.Response(502, content=content))
    assert str(failure) == f"status 502: {message}"
    assert failure.code is None


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: [1]\n\n"], ids=["cut", "list"])
def test_an_event_that_is_no_object_is_a_failure(data):
    answer = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    transport = httpx2.MockTransport(lambda request: answer)

    async def follow():
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            return [event async for event in stream_events(client, "/", {})]

    with pytest.raises(AnswerFailed, match="an event of the stream is not"):
        asyncio.run(follow())
