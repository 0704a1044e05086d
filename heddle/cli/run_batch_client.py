"""Requests of a batch, several at a time, each asked until it has an answer that will stay.

A server that is full or restarts says when to come back; then, and where a connection broke, the
same request is asked again. A server that cannot be reached at all ends the run: the lines that
are left would all fail, and a later run takes them up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx2

from heddle.bench.http_stream import (
    AnswerFailed,
    json_content,
    json_or_none,
    refusal,
    transport_message,
    whole_answer,
)
from heddle.cli.run_batch_files import BatchLine, entry
from heddle.errors import HeddleError

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 60.0
_BUSY = 429
_LATER = (_BUSY, 503)
"""Statuses that tell to come back."""

Write = Callable[[Mapping[str, Any]], None]


def _untold(why: str) -> None:
    """Nobody asked."""
    del why


async def run_lines(
    client: httpx2.AsyncClient,
    lines: Iterable[BatchLine],
    *,
    max_concurrency: int,
    max_retries: int,
    write: Write,
    on_wait: Callable[[str], None] = _untold,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Ask every line, and write what comes of it as it comes.

    Args:
        client: of the server.
        lines: to ask; one with a problem gives an error.
        max_concurrency: most open requests.
        max_retries: of one line.
        write: takes a line of the output.
        on_wait: told why a line is to be asked again.
        check: called before each try; raises to end the run.
    Raises:
        HeddleError: the server cannot be reached, or `check` says so.
    """
    left = iter(lines)

    async def work() -> None:
        for line in left:
            write(await _outcome(client, line, max_retries, on_wait, check))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_concurrency):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _outcome(
    client: httpx2.AsyncClient,
    line: BatchLine,
    max_retries: int,
    on_wait: Callable[[str], None],
    check: Callable[[], None],
) -> dict[str, Any]:
    if line.problem is not None:
        return entry(line.custom_id, error=("invalid_line", f"line {line.number} {line.problem}"))
    assert line.body is not None
    for attempt in range(max_retries + 1):
        check()
        is_last = attempt == max_retries
        try:
            response = await whole_answer(client, "POST", line.url, **json_content(line.body))
        except AnswerFailed as failure:
            return entry(line.custom_id, error=("no_answer", str(failure)))
        except httpx2.ConnectError as error:
            if is_last:
                raise HeddleError(f"{client.base_url}: {transport_message(error)}") from error
            on_wait(transport_message(error))
        except httpx2.HTTPError as error:
            if is_last:
                return entry(line.custom_id, error=("no_answer", transport_message(error)))
            on_wait(transport_message(error))
        else:
            if is_last or not _comes_back(response):
                return _answered(line, response)
            if response.status_code != _BUSY:  # a full server is nothing to be told of
                on_wait(str(refusal(response)))
            await asyncio.sleep(pause_seconds(response.headers, attempt))
            continue
        await asyncio.sleep(pause_seconds({}, attempt))
    raise AssertionError("the last try returns or raises")


def pause_seconds(headers: Mapping[str, str], attempt: int) -> float:
    """How long to wait before asking again: what the server says, else longer each time.

    Args:
        headers: of the answer; `retry-after-ms` wins over `retry-after`.
        attempt: tries before, from 0.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            told = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        if told >= 0:  # not NaN
            return min(told, MAX_PAUSE_SECONDS)
    return min(FIRST_PAUSE_SECONDS * 2.0**attempt, MAX_PAUSE_SECONDS)


def _comes_back(response: httpx2.Response) -> bool:
    told = response.headers.get("x-should-retry")
    return told == "true" or (response.status_code in _LATER and told != "false")


def _answered(line: BatchLine, response: httpx2.Response) -> dict[str, Any]:
    """A line of the output, of a good answer or of a refusal."""
    body = json_or_none(response.content)
    told = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id", ""),
        "body": body,
    }
    if response.status_code != 200:
        failure = refusal(response)
        code = failure.code or f"status_{response.status_code}"
        return entry(line.custom_id, response=told, error=(code, str(failure)))
    if not isinstance(body, dict):
        return entry(line.custom_id, response=told, error=("no_answer", "the answer is not JSON"))
    return entry(line.custom_id, response=told)
