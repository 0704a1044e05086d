"""Chunks of a stream, whatever the endpoint: progress, news, usage, the last line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from starlette.responses import JSONResponse

from heddle.engine.outputs import CompletionOutput, RequestOutput, joined
from heddle.server.errors import ApiError
from heddle.server.job import Job
from heddle.server.requests import SamplingRequest, StreamOptions
from heddle.server.serving import Serving
from heddle.server.sse import DONE, EventStream, event
from heddle.server.usage import Envelope, Usage

PROGRESS_SECONDS = 0.5
"""Between two reports of progress."""

Choices = Callable[[int, RequestOutput], Iterable[dict[str, Any]]]
"""(index of the prompt, output) to the choices of the chunks that tell it."""


def stream_options(asked: SamplingRequest) -> StreamOptions:
    """How to report.

    Raises:
        ApiError: options for an answer that is no stream.
    """
    if asked.stream_options is not None and not asked.stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")
    return asked.stream_options or StreamOptions()


async def written(make: Callable[[], dict[str, Any]], asked: SamplingRequest) -> JSONResponse:
    """A whole answer as JSON. Log-probabilities of a long prompt are many megabytes: they are
    written beside the event loop.

    Args:
        make: the document.
        asked: the request.
    """
    if asked.prompt_logprobs is None:
        return JSONResponse(make())
    return await asyncio.to_thread(lambda: JSONResponse(make()))


def event_stream(
    serving: Serving,
    job: Job,
    envelope: Envelope,
    kind: str,
    choices_of: Choices,
    options: StreamOptions,
    request_id: str,
) -> EventStream:
    """The answer of a streaming request.

    Args:
        serving: the server.
        job: in the engine; left when the stream ends.
        envelope: of every chunk.
        kind: `object` of every chunk.
        choices_of: makes the chunks.
        options: of the request.
        request_id: under which a failure is noted.
    """

    def explain(error: Exception) -> ApiError:
        found = serving.explain(error)
        serving.on_refusal(request_id, found)
        return found

    return EventStream(
        _events(serving, job, envelope, kind, choices_of, options),
        comment=job.progress_text,
        on_error=explain,
        keep_alive_seconds=serving.config.sse_keep_alive_interval,
        stall_seconds=serving.config.stream_stall_timeout,
    )


class HeldAnswers:
    """News that would give an empty chunk wait for the next one: their tokens are not lost."""

    def __init__(self) -> None:
        self._held: dict[int, CompletionOutput] = {}

    def take(self, place: int, news: CompletionOutput, *, is_news: bool) -> CompletionOutput | None:
        """All news of an answer so far, if there is something to tell.

        Args:
            place: of the answer in its response.
            news: since the last call.
            is_news: False: keep them.
        """
        held = self._held.pop(place, None)
        whole = news if held is None else joined(held, news)
        if is_news:
            return whole
        self._held[place] = whole
        return None


async def _events(
    serving: Serving,
    job: Job,
    envelope: Envelope,
    kind: str,
    choices_of: Choices,
    options: StreamOptions,
) -> AsyncGenerator[bytes, None]:
    usage = Usage(hides_cached=serving.config.hide_cached_tokens)
    reports = bool(options.include_usage or options.continuous_usage_stats)

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        if options.continuous_usage_stats and choices:
            more["usage"] = usage.document()
        elif reports:
            more.setdefault("usage", None)
        return event(envelope.document(kind, choices, **more))

    with job:
        news = job.news()
        waiting: asyncio.Future[tuple[int, RequestOutput]] = asyncio.ensure_future(anext(news))
        try:
            if options.include_progress:
                async for report in _progress(job, waiting):
                    if serving.config.hide_cached_tokens:
                        del report["cached_tokens"]
                    yield chunk([], progress=report)
            while True:
                try:
                    index, output = await waiting
                except StopAsyncIteration:
                    break
                waiting = asyncio.ensure_future(anext(news))
                usage.note(index, output)
                for choice in choices_of(index, output):
                    yield chunk([choice])
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})
            await news.aclose()
        if options.include_usage:
            yield chunk([], usage=usage.document())
        yield DONE


async def _progress(job: Job, first_news: asyncio.Future[Any]) -> AsyncGenerator[Any, None]:
    """Reports until the first news, one whenever more of the prompt is computed."""
    told = -1
    while not first_news.done():
        await asyncio.wait({first_news}, timeout=PROGRESS_SECONDS)
        known = [stream.progress for stream in job.streams if stream.progress is not None]
        done = sum(each.num_computed for each in known)
        if first_news.done() or not known or done == told:
            continue
        told = done
        estimates = [each.first_token_seconds for each in known]
        yield {
            "prompt_tokens": sum(each.num_total for each in known),
            "computed_tokens": done,
            "cached_tokens": sum(each.num_cached for each in known),
            "waiting_ahead": max(each.num_ahead for each in known),
            "estimated_seconds_to_first_token": (
                None if None in estimates else round(max(filter(None, estimates), default=0.0), 3)
            ),
        }
