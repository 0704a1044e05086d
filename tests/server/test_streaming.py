"""Chunks of a stream: what is held back, when usage is told, and what a job that ends leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from heddle.errors import RankFailed
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError
from heddle.server.requests import CompletionRequest, StreamOptions
from heddle.server.serving import Serving
from heddle.server.sse import EventStream
from heddle.server.streaming import HeldAnswers, event_stream, stream_options
from heddle.server.usage import Envelope
from tests.support.served import parse_events


def answer(text: str, *token_ids: int, reason: Any = None) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=reason,
        stop_reason=None,
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20))
def test_news_that_are_held_back_come_with_the_next_chunk(steps: list[tuple[int, bool]]) -> None:
    held = HeldAnswers()
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    expected: dict[int, list[int]] = {0: [], 1: [], 2: []}
    pending: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for number, (place, is_news) in enumerate(steps):
        pending[place].append(number)
        whole = held.take(place, answer("", number), is_news=is_news)
        assert (whole is not None) == is_news
        if whole is not None:
            told[place] += whole.token_ids
            expected[place] += pending[place]
            pending[place] = []
    assert told == expected


def test_held_news_are_joined_with_the_end_of_the_answer() -> None:
    held = HeldAnswers()
    assert held.take(0, answer("", 5), is_news=False) is None
    assert held.take(0, answer("é", 6, reason="stop"), is_news=True) == answer(
        "é", 5, 6, reason="stop"
    )


def test_options_are_for_streams() -> None:
    options = StreamOptions(include_usage=True)
    asked = CompletionRequest(prompt="a", stream=True, stream_options=options)
    assert stream_options(asked) is options
    assert stream_options(CompletionRequest(prompt="a")) == StreamOptions()
    with pytest.raises(ApiError, match="stream: true") as caught:
        stream_options(CompletionRequest(prompt="a", stream_options=options))
    assert caught.value.param == "stream_options"


class PlayedJob:
    """A job that says what a test wants."""

    def __init__(self, *outputs: RequestOutput, error: Exception | None = None) -> None:
        self._outputs, self._error = outputs, error
        self.streams: tuple[Any, ...] = ()
        self.has_left = False

    def __enter__(self) -> PlayedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.has_left = True

    async def news(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for output in self._outputs:
            yield 0, output
        if self._error is not None:
            raise self._error

    def progress_text(self) -> str:
        return "waiting"


def stream_of(job: PlayedJob, **options: bool) -> EventStream:
    return event_stream(
        Serving(ServerConfig(), "toy"),
        job,  # type: ignore[arg-type]
        Envelope("cmpl", "toy", "f"),
        "text_completion",
        lambda index, output: [{"index": index, "text": a.text} for a in output.outputs],
        StreamOptions(**options),
        "r1",
    )


def sent_by(job: PlayedJob, **options: bool) -> list[Any]:
    """Messages of the answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.get_running_loop().create_future()

    asyncio.run(stream_of(job, **options)({}, receive, send))
    assert job.has_left
    return sent


def told(job: PlayedJob, **options: bool) -> list[Any]:
    """Documents of the events of a good answer."""
    start, *bodies = sent_by(job, **options)
    assert start["status"] == 200
    return parse_events(b"".join(message["body"] for message in bodies).decode())


def output(*answers: CompletionOutput) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        prompt_logprobs=None,
        outputs=answers,
        finished=False,
        metrics=RequestMetrics(arrival_time=0.0),
        num_cached_tokens=0,
    )


def test_usage_comes_after_the_last_choice_and_before_the_end() -> None:
    news = output(answer("a", 5)), output(answer("b", 6, 7))
    first, second, last, done = told(PlayedJob(*news), include_usage=True)
    assert [chunk["usage"] for chunk in (first, second)] == [None, None]
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 3)
    assert done == "[DONE]"


def test_usage_can_grow_with_every_chunk() -> None:
    news = output(answer("a", 5)), output(answer("b", 6, 7))
    first, second, done = told(PlayedJob(*news), continuous_usage_stats=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in (first, second)] == [1, 3]
    assert done == "[DONE]"


def test_usage_is_not_told_unless_asked_for() -> None:
    chunk, done = told(PlayedJob(output(answer("a", 5))))
    assert "usage" not in chunk
    assert done == "[DONE]"


def test_a_job_that_fails_before_its_first_news_is_a_plain_error() -> None:
    start, *_ = sent_by(PlayedJob(error=RankFailed("gone")))
    assert start["status"] == 503


def test_a_job_that_fails_later_ends_with_the_error() -> None:
    first, last = told(PlayedJob(output(answer("a", 5)), error=RankFailed("gone")))
    assert first["choices"] == [{"index": 0, "text": "a"}]
    assert last["error"]["code"] == "engine_unavailable"
