from __future__ import annotations

import asyncio

import httpx2
import pytest

from heddle.cli import run_batch_client
from heddle.cli.run_batch_client import pause_seconds, run_lines
from heddle.cli.run_batch_files import BatchLine
from heddle.errors import HeddleError


def lines(num=1, **changes):
    return [
        BatchLine(number=index + 1, custom_id=f"r{index}", url="/v1/completions", body={"n": 1})
        if not changes
        else BatchLine(number=index + 1, custom_id=f"r{index}", **changes)
        for index in range(num)
    ]


def ask(answer, asked, *, max_retries=2, max_concurrency=3, check=lambda: None, waits=None):
    written = []

    async def follow():
        transport = httpx2.MockTransport(answer)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            await run_lines(
                client,
                asked,
                max_concurrency=max_concurrency,
                max_retries=max_retries,
                write=written.append,
                on_wait=(waits if waits is not None else []).append,
                check=check,
            )

    asyncio.run(follow())
    return written


class Replies:
    """Gives one reply after the other, the last one for ever; an exception is raised."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.num_asked = 0

    def __call__(self, request):
        self.num_asked += 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


def reply(status=200, document=None, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, json=document or {"choices": []}, headers=headers)


def test_an_answer_is_kept_whole():
    (written,) = ask(Replies(reply(document={"choices": [7]}, x_request_id="id-1")), lines())
    assert written["custom_id"] == "r0"
    assert written["error"] is None
    assert written["response"] == {
        "status_code": 200,
        "request_id": "id-1",
        "body": {"choices": [7]},
    }


@pytest.mark.parametrize(
    "first",
    [
        reply(429, retry_after="0"),
        reply(503, retry_after_ms="1"),
        reply(500, x_should_retry="true", retry_after="0"),
    ],
    ids=["full", "restarting", "told to"],
)
def test_a_server_that_says_come_back_is_asked_again(first):
    replies = Replies(first, first, reply())
    (written,) = ask(replies, lines())
    assert (written["error"], replies.num_asked) == (None, 3)


@pytest.mark.parametrize(
    "answer",
    [
        reply(400, {"error": {"message": "no such field", "code": "invalid"}}),
        reply(500, {"error": {"message": "no such field", "code": "invalid"}}),
        reply(
            503, {"error": {"message": "no such field", "code": "invalid"}}, x_should_retry="false"
        ),
    ],
    ids=["wrong", "fault", "told not to"],
)
def test_a_refusal_that_will_stay_is_an_error_at_once(answer):
    replies = Replies(answer)
    (written,) = ask(replies, lines())
    assert replies.num_asked == 1
    assert written["error"]["code"] == "invalid"
    assert written["error"]["message"].endswith("no such field")
    assert written["response"]["status_code"] == answer.status_code
    assert written["response"]["body"]["error"]["code"] == "invalid"


def test_a_server_that_is_not_there_yet_is_told_of_and_a_full_one_is_not(monkeypatch):
    monkeypatch.setattr(run_batch_client, "FIRST_PAUSE_SECONDS", 0.0)
    loading = reply(503, {"error": {"message": "the model is loading"}}, retry_after_ms="1")
    waits = []
    replies = Replies(httpx2.ConnectError("refused"), loading, reply())
    (written,) = ask(replies, lines(), waits=waits)
    assert written["error"] is None
    assert waits == ["ConnectError: refused", "status 503: the model is loading"]
    ask(Replies(reply(429, retry_after="0"), reply()), lines(), waits=waits)
    assert len(waits) == 2


def test_tries_have_an_end():
    replies = Replies(reply(429, retry_after="0"))
    (written,) = ask(replies, lines(), max_retries=3)
    assert replies.num_asked == 4
    assert written["error"]["code"] == "status_429"


def test_a_connection_that_breaks_is_tried_again_and_is_an_error_of_its_line(monkeypatch):
    monkeypatch.setattr(run_batch_client, "FIRST_PAUSE_SECONDS", 0.001)
    replies = Replies(httpx2.ReadError("gone"), reply())
    assert ask(replies, lines())[0]["error"] is None
    replies = Replies(httpx2.ReadError("gone"))
    (written,) = ask(replies, lines())
    assert written["error"] == {"code": "no_answer", "message": "ReadError: gone"}
    assert written["response"] is None
    assert replies.num_asked == 3


def test_a_server_that_cannot_be_reached_ends_the_run(monkeypatch):
    monkeypatch.setattr(run_batch_client, "FIRST_PAUSE_SECONDS", 0.001)
    with pytest.raises(HeddleError, match="http://x: ConnectError: refused"):
        ask(Replies(httpx2.ConnectError("refused")), lines(50))


def test_an_engine_that_is_gone_ends_the_run():
    replies = Replies(reply())

    def check():
        if replies.num_asked == 2:
            raise HeddleError("the engine has failed")

    with pytest.raises(HeddleError, match="has failed"):
        ask(replies, lines(9), max_concurrency=1, check=check)
    assert replies.num_asked == 2


def test_a_bad_line_is_an_error_with_its_number_and_is_not_asked():
    replies = Replies(reply())
    written = ask(replies, lines(2, problem="has no body"))
    assert replies.num_asked == 0
    assert [each["error"]["message"] for each in written] == [
        "line 1 has no body",
        "line 2 has no body",
    ]
    assert {each["error"]["code"] for each in written} == {"invalid_line"}


def test_an_answer_that_is_no_json_is_an_error():
    (written,) = ask(Replies(httpx2.Response(200, text="hello")), lines())
    assert written["error"] == {"code": "no_answer", "message": "the answer is not JSON"}


def test_no_more_requests_are_open_than_allowed():
    num_open = most = 0

    async def answer(request):
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.005)
        num_open -= 1
        return reply()

    assert len(ask(answer, lines(10), max_concurrency=3)) == 10
    assert most == 3


@pytest.mark.parametrize(
    ("headers", "attempt", "seconds"),
    [
        ({"retry-after": "2"}, 5, 2.0),
        ({"retry-after": "2", "retry-after-ms": "300"}, 5, 0.3),
        ({"retry-after": "86400"}, 0, 60.0),
        ({"retry-after": "nan"}, 0, 0.5),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1, 1.0),
        ({}, 3, 4.0),
        ({}, 99, 60.0),
    ],
    ids=str,
)
def test_pauses_are_those_of_the_server_within_reason(headers, attempt, seconds):
    assert pause_seconds(headers, attempt) == seconds
