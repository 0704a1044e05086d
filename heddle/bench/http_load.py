"""A load of streaming requests on an OpenAI-shaped server, each one timed.

    send times --> limit of open requests --> stream, chunk by chunk --> RequestRecord

What fails is kept as a record with its reason, and nothing is asked again: a server that refuses
under load shall look like one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from heddle.bench.http_load_prompts import WORDS, Prompt, send_times
from heddle.bench.http_stream import (
    AnswerFailed,
    json_content,
    json_or_none,
    refusal,
    stream_events,
    transport_message,
    whole_answer,
)
from heddle.bench.serving_report import RequestRecord
from heddle.errors import ConfigError, HeddleError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_VOCAB_SIZE = 30_000
"""Where neither the caller nor the server says which ids are legal."""
ANSWER_SECONDS = 6 * 3600.0
"""Longest silence of a stream."""
CONNECT_SECONDS = 60.0
READY_PAUSE_SECONDS = 0.25
MAX_COUNT = 1 << 53
"""Largest count that a server is believed to mean."""
_REFUSED_FOR_NOW = (408, 425, 429)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked, and how fast."""

    endpoint: str
    """Path: `COMPLETIONS`, `CHAT`, or another one that takes the body of one of these."""
    model: str
    prompts: Sequence[Prompt]
    """One per request."""
    output_len: int
    """Most tokens of an answer."""
    request_rate: float = float("inf")
    """Requests per second."""
    burstiness: float = 1.0
    max_concurrency: int | None = None
    """Most open requests; None: no limit."""
    seed: int = 0
    """Of the send times."""
    extra: Mapping[str, Any] | None = None
    """Further fields of every body."""

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Of the request for a prompt."""
        if "chat" in self.endpoint:
            content = {"messages": [{"role": "user", "content": prompt}]}
        else:
            content = {"prompt": prompt}  # type: ignore[dict-item]
        return {
            "model": self.model,
            **content,
            "max_tokens": self.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(self.extra or {}),
        }


def create_client(base_url: str, api_key: str | None = None) -> httpx2.AsyncClient:
    """A client without a limit of connections; close it in the loop that used it.

    Args:
        base_url: of the server; a `/v1` at its end, as other clients want it, is left out.
        api_key: to show; none: none is shown.
    Raises:
        ConfigError: not a URL.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        url = httpx2.URL(base_url.rstrip("/").removesuffix("/v1"))
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{base_url!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{base_url!r} is not a URL such as http://127.0.0.1:8000")
    return httpx2.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def run_load(
    client: httpx2.AsyncClient, load: Load, on_end: Callable[[RequestRecord], None]
) -> tuple[list[RequestRecord], float]:
    """Send everything and wait for the last answer.

    Args:
        client: of the server.
        load: what to send.
        on_end: told of each request that ended, well or not.
    Returns:
        A record per prompt, in order, and the seconds that all of them took.
    """
    times = send_times(
        len(load.prompts), rate=load.request_rate, burstiness=load.burstiness, seed=load.seed
    )
    gate = nullcontext() if not load.max_concurrency else asyncio.Semaphore(load.max_concurrency)
    started = time.perf_counter()

    async def ask(index: int) -> RequestRecord:
        await asyncio.sleep(started + times[index] - time.perf_counter())
        async with gate:
            record = await timed_request(client, load, index, started)
        on_end(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(index)) for index in range(len(load.prompts))]
    return [task.result() for task in tasks], time.perf_counter() - started


async def timed_request(
    client: httpx2.AsyncClient, load: Load, index: int, started: float
) -> RequestRecord:
    """Send one request now and follow it to its end.

    Args:
        client: of the server.
        load: it belongs to.
        index: of its prompt.
        started: when the load did, on the clock of `time.perf_counter`.
    Returns:
        Its record. Tokens are those of the server's `usage`; a server that gives none is taken to
        send a token per chunk. A token without text (part of a character, a special one) is seen
        only where its chunk names it (`return_token_ids`).
    """
    prompt = load.prompts[index]
    sent = ended = time.perf_counter() - started
    chunks: list[float] = []
    usage: Mapping[str, Any] = {}
    error: str | None = None
    try:
        async for event in stream_events(client, load.endpoint, load.body(prompt)):
            if isinstance(event.get("usage"), dict):
                usage = event["usage"]
            choices = event.get("choices")
            if not choices:
                continue
            ended = time.perf_counter() - started
            if text_of(choices) or has_token_ids(choices):
                chunks.append(ended)
    except AnswerFailed as failure:
        error, ended = str(failure), time.perf_counter() - started
    if error is None and ended == sent:
        error = "the stream had no choices"
    if error is None and not chunks:
        chunks = [ended]  # every token was one without text
    return RequestRecord(
        index=index,
        prompt_tokens=_count(usage, "prompt_tokens", _length(prompt)),
        output_tokens=_count(usage, "completion_tokens", len(chunks)),
        sent=sent,
        ended=ended,
        chunks=tuple(chunks),
        error=error,
    )


def text_of(choices: Any) -> str:
    """Text that a chunk brings, of answers, reasoning and arguments of calls alike."""
    found = ""
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        places = (choice, delta) if isinstance(choice, dict) else ()
        for place in places:
            if isinstance(place, dict):
                fields = ("text", "content", "reasoning_content", "reasoning", "tool_calls")
                found += "".join(str(place[name]) for name in fields if place.get(name))
    return found


def has_token_ids(choices: Any) -> bool:
    """Whether a chunk names tokens, with text or without."""
    listed = choices if isinstance(choices, list) else ()
    return any(isinstance(choice, dict) and choice.get("token_ids") for choice in listed)


async def answer_once(client: httpx2.AsyncClient, load: Load) -> None:
    """Ask the first prompt of a load, and follow it to its end.

    Raises:
        AnswerFailed: it was not answered.
    """
    async for _ in stream_events(client, load.endpoint, load.body(load.prompts[0])):
        pass


async def first_model(client: httpx2.AsyncClient) -> str:
    """The first name that the server offers.

    Raises:
        AnswerFailed: it gave no answer.
        HeddleError: it offers none.
    """
    response = await _asked(client, "GET", "/v1/models")
    if response.status_code != 200:
        raise refusal(response)
    try:
        return str(json_or_none(response.content)["data"][0]["id"])
    except (LookupError, TypeError):
        raise HeddleError(f"{client.base_url} offers no model at /v1/models; name it") from None


async def token_pool(client: httpx2.AsyncClient, model: str) -> Sequence[int]:
    """Ids that prompts may be made of: those that the server cuts common words into.

    A server that does not offer `/tokenize` is taken to have `DEFAULT_VOCAB_SIZE` of them.

    Raises:
        AnswerFailed: the server gave no answer, not even that it cannot.
    """
    body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    response = await _asked(client, "POST", "/tokenize", **json_content(body))
    if response.status_code >= 500 or response.status_code in _REFUSED_FOR_NOW:
        raise refusal(response)
    try:
        tokens = json_or_none(response.content)["tokens"]
        found = sorted({each for each in tokens if type(each) is int and each >= 0})
    except (LookupError, TypeError):
        found = []
    return found or range(DEFAULT_VOCAB_SIZE)


async def within(
    timeout_seconds: float, client: httpx2.AsyncClient, attempt: Callable[[], Awaitable[Result]]
) -> Result:
    """Try until a server that still starts gives an answer.

    Args:
        timeout_seconds: after which to give up; 0: one try.
        client: of the server.
        attempt: asks once; raises `AnswerFailed`.
    Raises:
        ConfigError: the server says that the request itself is wrong.
        HeddleError: no answer in time; with the last reason.
    """
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            return await attempt()
        except AnswerFailed as failure:
            status = failure.status or 0
            if 400 <= status < 500 and status not in _REFUSED_FOR_NOW:
                raise ConfigError(f"{client.base_url} refuses: {failure}") from failure
            if time.monotonic() >= end:
                waited = f" within {timeout_seconds:g} s; the last reason" * (timeout_seconds > 0)
                raise HeddleError(
                    f"{client.base_url} gave no answer{waited}: {failure}"
                ) from failure
        await asyncio.sleep(READY_PAUSE_SECONDS)


async def _asked(
    client: httpx2.AsyncClient, method: str, path: str, **content: Any
) -> httpx2.Response:
    try:
        return await whole_answer(client, method, path, **content)
    except httpx2.HTTPError as error:
        raise AnswerFailed(transport_message(error)) from error


def _count(usage: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = usage.get(name)
    return value if type(value) is int and 0 <= value <= MAX_COUNT else otherwise


def _length(prompt: Prompt) -> int:
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)
