"""Requests are prepared in threads, and what may take long waits for its like alone.

    any request           the threads of the event loop
    a new form            schema, regex or grammar that nobody has asked for yet: compiled first
    a conversation        rendered by the model's template
    a template of one's own    rendered by the template that the request brought

Each of the last three has threads of its own and a bounded queue, and those who wait in it are let
go at their deadlines. Beside that, the large requests of one client come one after another, so
that they hold one thread of each kind and not all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from heddle.server.errors import ApiError

SLOW_THREADS = 2
"""That compile forms at once; other requests have threads of their own."""
MAX_SLOW = 64
"""Requests whose form is to be compiled; further ones are refused."""
MAX_RENDERED = 1024
"""Conversations that wait for the model's template."""
MAX_GIVEN = 16
"""Those that wait for a template of their own."""
LARGE_BYTES = 1 << 18
"""Of a body: reading, rendering and tokenizing more takes a noticeable time."""
MAX_LARGE = 32
"""Large requests of one client that wait for each other; further ones are refused."""
T = TypeVar("T")


class Lane:
    """Some threads and the queue before them."""

    def __init__(self, num_threads: int, most: int, what: str) -> None:
        """Start none yet.

        Args:
            num_threads: that work at once.
            most: jobs that work or wait.
            what: in the words of a refusal, behind their number.
        """
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="heddle-prepare")
        self._most, self._what = most, what
        self._count = 0

    async def run(self, work: Callable[[], T], deadline: float | None) -> T:
        """What a function returns, run in one of the threads.

        Args:
            work: the function.
            deadline: time of the loop at which it is given up; None: never.
        Raises:
            ApiError: too many wait, or the deadline has passed.
        """
        if self._count >= self._most:
            raise ApiError(f"{self._most} {self._what}", "engine_overloaded")
        self._count += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise _late() from None
        finally:
            self._count -= 1


class Turns:
    """Large jobs of one client, one at a time."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._counts: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def turn(self, client: str, deadline: float | None) -> AsyncIterator[None]:
        """Wait for one's turn, and have it.

        Args:
            client: whose; those without a key are one client.
            deadline: time of the loop at which the wait is given up; None: never.
        Raises:
            ApiError: too many of this client wait, or the deadline has passed.
        """
        count = self._counts.get(client, 0)
        if count >= MAX_LARGE:
            message = f"{MAX_LARGE} large requests of this client are being read"
            raise ApiError(message, "engine_overloaded")
        self._counts[client] = count + 1
        lock = self._locks.setdefault(client, asyncio.Lock())
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await lock.acquire()
            except TimeoutError:
                raise _late() from None
            try:
                yield
            finally:
                lock.release()
        finally:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client], self._locks[client]


class Preparing:
    """The threads of one server."""

    def __init__(self) -> None:
        self._forms = Lane(SLOW_THREADS, MAX_SLOW, "descriptions of a form wait to be compiled")
        self._rendered = Lane(2, MAX_RENDERED, "conversations wait to be rendered")
        self._given = Lane(1, MAX_GIVEN, "conversations wait for templates of their own")
        self._turns = Turns()

    async def run(self, prepare: Callable[[], T], *, is_slow: bool, deadline: float | None) -> T:
        """What a function returns, run in a thread.

        Args:
            prepare: the function.
            is_slow: it may have a form to compile.
            deadline: time of the loop at which a slow one is given up; None: never.
        Raises:
            ApiError: too many slow ones wait, or the deadline has passed.
        """
        if is_slow:
            return await self._forms.run(prepare, deadline)
        return await asyncio.get_running_loop().run_in_executor(None, prepare)

    async def render(self, render: Callable[[], T], *, is_given: bool, deadline: float | None) -> T:
        """The text of a conversation.

        Args:
            render: makes it.
            is_given: by a template that the request brought.
            deadline: time of the loop at which it is given up; None: never.
        Raises:
            ApiError: too many wait, or the deadline has passed.
        """
        return await (self._given if is_given else self._rendered).run(render, deadline)

    def turn(
        self, client: str, num_bytes: int, deadline: float | None
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """A block in which a request is read and prepared; a small one need not wait.

        Args:
            client: whose request it is.
            num_bytes: of its body.
            deadline: time of the loop at which the wait is given up; None: never.
        """
        if num_bytes <= LARGE_BYTES:
            return contextlib.nullcontext()
        return self._turns.turn(client, deadline)


def _late() -> ApiError:
    return ApiError("the time limit of the request has passed", "request_timeout")
