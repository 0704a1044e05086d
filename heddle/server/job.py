"""One HTTP request in the engine: what its prompts give, until they end or somebody gives up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from heddle.engine.async_llm import AsyncLLM, Stream
from heddle.engine.outputs import RequestOutput
from heddle.scheduler.door import Door, Ticket
from heddle.server.errors import ApiError
from heddle.server.sse import wait_until_gone

Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Job:
    """The prompts of one HTTP request, in the engine. Leaving it aborts what is open."""

    def __init__(
        self,
        streams: Sequence[Stream],
        tickets: Sequence[Ticket],
        *,
        engine: AsyncLLM,
        door: Door,
        deadline: float | None,
        leave: Callable[[Job], None],
    ) -> None:
        """Follow streams that were submitted.

        Args:
            streams: of the prompts, in order.
            tickets: that let them in.
            engine: they run in.
            door: that the tickets are of.
            deadline: time of the loop at which all are given up; None: never.
            leave: told when nobody follows them any more.
        """
        self.streams = tuple(streams)
        self._tickets, self._door = tickets, door
        for stream, ticket in zip(streams, tickets, strict=True):
            stream.on_start = partial(door.started, ticket)
        self._deadline = deadline
        self._ended: set[tuple[int, int]] = set()
        self._given_up = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._leave = leave

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(self)
        for stream, ticket in zip(self.streams, self._tickets, strict=True):
            self._engine.abort(stream)
            self._door.left(ticket)

    def give_up(self) -> None:
        """Let `news` end with an error: the operator wants it."""
        if not self._given_up.done():
            self._given_up.set_result(None)

    async def news(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, output) as they come, until all have ended.

        Raises:
            RequestError: one of them failed; the others are of no use any more.
            ApiError: the deadline has passed, or the operator has ended it.
        """
        loop = asyncio.get_running_loop()
        waiting: dict[asyncio.Future[RequestOutput], int] = {
            asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(self.streams)
        }
        try:
            while waiting:
                left = None if self._deadline is None else max(self._deadline - loop.time(), 0)
                either: set[asyncio.Future[Any]] = {*waiting, self._given_up}
                await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if self._given_up.done():
                    raise ApiError(
                        "the operator has ended this request",
                        "engine_unavailable",
                        headers={"x-should-retry": "false"},
                    )
                if left == 0:
                    raise ApiError("the time limit of the request has passed", "request_timeout")
                for done in [task for task in waiting if task.done()]:
                    index = waiting.pop(done)
                    output = done.result()
                    if output.error is not None:
                        raise output.error
                    if not output.finished:
                        waiting[asyncio.ensure_future(anext(self.streams[index]))] = index
                    yield index, self._without_ended(index, output)
        finally:
            for task in waiting:
                task.cancel()
                if task.done() and not task.cancelled():
                    task.exception()  # seen, and of no use beside the one that is raised

    def _without_ended(self, index: int, output: RequestOutput) -> RequestOutput:
        """Leave out answers whose end was told before; the others go on."""
        open_answers = tuple(
            answer for answer in output.outputs if (index, answer.index) not in self._ended
        )
        self._ended |= {
            (index, answer.index) for answer in open_answers if answer.finish_reason is not None
        }
        return dataclasses.replace(output, outputs=open_answers)

    async def whole(self) -> list[RequestOutput]:
        """The last output of each prompt, in order."""
        found = {index: output async for index, output in self.news() if output.finished}
        return [found[index] for index in range(len(self.streams))]

    def progress_text(self) -> str:
        """For a comment line: how much of the prompts is computed."""
        known = [stream.progress for stream in self.streams if stream.progress is not None]
        if not known:  # no step has ended since it came
            return f"prefill 0/{sum(len(stream.prepared.prompt.ids) for stream in self.streams)}"
        done, total = sum(p.num_computed for p in known), sum(p.num_total for p in known)
        ahead = max(p.num_ahead for p in known)
        if not any(p.is_running for p in known):
            return f"waiting, {ahead} ahead"
        return f"prefill {done}/{total}" if done < total else "decoding"


async def while_there(request: Request, work: Awaitable[Result]) -> Result:
    """The result of some work, given up when the client leaves.

    Raises:
        ClientGone: it has left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})
