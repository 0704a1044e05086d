from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from heddle.bench.http_load import (
    CHAT,
    COMPLETIONS,
    DEFAULT_VOCAB_SIZE,
    Load,
    answer_once,
    create_client,
    first_model,
    has_token_ids,
    run_load,
    text_of,
    token_pool,
    within,
)
from heddle.errors import ConfigError, HeddleError
from tests.support.fake_openai import SLOW_SECONDS, TOKENS, fake_server


@pytest.fixture
def fake():
    with fake_server() as server:
        yield server


def load(model="normal", num=3, endpoint=COMPLETIONS, **changes):
    prompts = [[index, 1] if endpoint == COMPLETIONS else f"word {index}" for index in range(num)]
    return Load(endpoint=endpoint, model=model, prompts=prompts, output_len=4, **changes)


def run(fake, asked, key=None):
    ended = []

    async def follow():
        async with create_client(fake.url, key) as client:
            return await run_load(client, asked, ended.append)

    records, duration = asyncio.run(follow())
    assert sorted(record.index for record in ended) == list(range(len(asked.prompts)))
    assert [record.index for record in records] == list(range(len(asked.prompts)))
    return records, duration


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_chunks_are_timed_and_tokens_are_those_of_usage(fake, endpoint):
    records, duration = run(fake, load("slow", endpoint=endpoint, extra={"ignore_eos": True}))
    for record in records:
        assert record.error is None
        assert (record.prompt_tokens, record.output_tokens) == (11, 4)
        assert len(record.chunks) == 3  # neither the role nor the finish is text
        assert record.ttft >= SLOW_SECONDS
        assert min(record.itls) > 0.0
        assert record.chunks[-1] <= record.ended <= duration
        assert record.e2el >= 4 * SLOW_SECONDS
    body = fake.bodies[0]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert ("messages" in body) == (endpoint == CHAT)


def test_without_usage_chunks_are_counted_and_an_answer_without_text_has_a_time(fake):
    records, _ = run(fake, load("silent", num=1))
    (record,) = records
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens) == (2, 1)
    assert record.chunks == (record.ended,)
    assert record.ttft > 0.0


@pytest.mark.parametrize(
    ("model", "message", "num_chunks"),
    [
        ("busy-1", "status 429: the queue is full", 0),
        ("refusing", "status 400: no such field", 0),
        ("crashing", "status 500: Internal Server Error", 0),
        ("broken", "a rank died", 1),
        ("cut", "without [DONE]", 3),
        ("torn", "RemoteProtocolError", 1),
    ],
)
def test_a_failure_is_a_record_with_its_reason_and_is_not_asked_again(
    fake, model, message, num_chunks
):
    records, _ = run(fake, load(model))
    for record in records:
        assert message in record.error
        assert len(record.chunks) == num_chunks
        assert record.ended >= record.sent
    assert len(fake.bodies) == 3


def test_bytes_one_by_one_are_the_same_answer(fake):
    records, _ = run(fake, load("bytes", num=1))
    assert records[0].error is None
    assert (len(records[0].chunks), records[0].output_tokens) == (3, 4)


def test_no_more_requests_are_open_than_allowed(fake):
    run(fake, load("slow", num=6, max_concurrency=2))
    assert fake.most_open == 2
    fake.most_open = 0
    run(fake, load("slow", num=6))
    assert fake.most_open == 6


def test_requests_are_sent_at_their_times(fake):
    records, duration = run(fake, load(num=8, request_rate=20.0, seed=1))
    sent = [record.sent for record in records]
    assert sent == sorted(sent)
    assert sent[-1] > 0.05
    assert duration >= sent[-1]


def test_the_key_is_shown(fake):
    run(fake, load(num=1), key="secret")
    assert fake.authorizations == {"Bearer secret"}


def ask(url, function, *arguments, seconds=0.0):
    async def follow():
        async with create_client(url) as client:
            return await within(seconds, client, partial(function, client, *arguments))

    return asyncio.run(follow())


def test_a_server_that_is_not_ready_is_asked_until_it_is(fake):
    ask(fake.url, answer_once, load("busy-2"), seconds=30.0)
    assert len(fake.bodies) == 3
    fake.num_loading = 3
    assert ask(fake.url, first_model, seconds=30.0) == "normal"
    fake.num_loading = 2
    assert ask(fake.url, token_pool, "normal", seconds=30.0) == TOKENS
    assert fake.num_loading == 0


def test_waiting_ends_in_time_and_at_once_where_it_is_no_use(fake):
    with pytest.raises(ConfigError, match=rf"{fake.url} refuses: status 400: no such field"):
        ask(fake.url, answer_once, load("refusing"), seconds=30.0)
    assert len(fake.bodies) == 1
    started = time.monotonic()
    with pytest.raises(HeddleError, match=r"no answer within 0.3 s; the last reason: Connect"):
        ask("http://127.0.0.1:1", answer_once, load(), seconds=0.3)
    assert time.monotonic() - started >= 0.3
    fake.num_loading = 9
    with pytest.raises(HeddleError, match="gave no answer: status 503: the model is loading"):
        ask(fake.url, token_pool, "normal")
    assert fake.num_loading == 8


def test_the_model_is_the_first_one_offered(fake):
    assert ask(fake.url, first_model) == "normal"
    assert ask(f"{fake.url}/v1/", first_model) == "normal"
    with pytest.raises(HeddleError, match=r"127.0.0.1:1 gave no answer: ConnectError"):
        ask("http://127.0.0.1:1", first_model)
    with pytest.raises(ConfigError, match="status 404: no such path"):
        ask(f"{fake.url}/elsewhere", first_model)
    fake.models = []
    with pytest.raises(HeddleError, match="offers no model at /v1/models; name it"):
        ask(fake.url, first_model)


def test_ids_come_from_the_tokenizer_of_the_server_where_it_has_one(fake):
    assert ask(fake.url, token_pool, "normal") == TOKENS
    fake.has_tokenize = False
    assert ask(fake.url, token_pool, "normal") == range(DEFAULT_VOCAB_SIZE)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://[::1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="is not a URL"):
        create_client(url)


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ([{"text": "a"}, {"text": "b"}], "ab"),
        ([{"delta": {"reasoning_content": "r", "content": None}}], "r"),
        ([{"delta": {"role": "assistant", "content": ""}}], ""),
        ([{"delta": None}, 3], ""),
        ("odd", ""),
    ],
    ids=str,
)
def test_text_of_a_chunk_of_any_shape(choices, text):
    assert text_of(choices) == text


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ([{"text": "", "token_ids": [7]}], True),
        ([{"text": ""}, {"delta": {}, "token_ids": [7, 8]}], True),
        ([{"text": "a", "token_ids": []}], False),
        ([{"text": "a", "token_ids": None}, 3], False),
        ("odd", False),
    ],
    ids=str,
)
def test_tokens_of_a_chunk_may_be_named_without_text(choices, named):
    assert has_token_ids(choices) == named
