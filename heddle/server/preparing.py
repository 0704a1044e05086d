"""Requests are prepared in threads, and those with a new form wait for each other alone.

A form (schema, regex, grammar) that nobody has asked for yet is compiled, which takes seconds where
it is hostile. Such requests have threads of their own, a bounded queue, and their deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from heddle.server.errors import ApiError

SLOW_THREADS = 2
"""That compile forms at once; other requests have threads of their own."""
MAX_SLOW = 64
"""Requests whose form is to be compiled; further ones are refused."""
T = TypeVar("T")


class Preparing:
    """The threads of one server."""

    def __init__(self) -> None:
        self._slow = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="heddle-grammar")
        self._num_slow = 0

    async def run(self, prepare: Callable[[], T], *, is_slow: bool, deadline: float | None) -> T:
        """What a function returns, run in a thread.

        Args:
            prepare: the function.
            is_slow: it may have a form to compile.
            deadline: time of the loop at which a slow one is given up; None: never.
        Raises:
            ApiError: too many slow ones wait, or the deadline has passed.
        """
        loop = asyncio.get_running_loop()
        if not is_slow:
            return await loop.run_in_executor(None, prepare)
        if self._num_slow >= MAX_SLOW:
            message = f"{MAX_SLOW} descriptions of a form wait to be compiled"
            raise ApiError(message, "engine_overloaded")
        self._num_slow += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await loop.run_in_executor(self._slow, prepare)
        except TimeoutError:
            message = "the time limit of the request has passed"
            raise ApiError(message, "request_timeout") from None
        finally:
            self._num_slow -= 1
