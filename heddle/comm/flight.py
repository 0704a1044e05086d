"""Work of torch under way, waited for until a deadline of ours; tells a late peer from a lost one.

A group that has failed once may still hold half a collective, so nothing begins on it again.
Deadlines are set when work begins: a transfer that was hidden behind computation has as much time
as one that is waited for at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from heddle.errors import CollectiveTimeout, RankFailed

_SHORTEST_WAIT_SECONDS = 0.001
"""torch counts in milliseconds and reads 0 as its own limit; work that is done needs no time."""


@dataclass(frozen=True, slots=True)
class Flight:
    """What one call has begun."""

    what: str
    """Names the call in errors."""
    works: tuple[Any, ...]
    limit: float
    """Seconds from the beginning to the deadline."""
    deadline: float


class Flights:
    """The calls of one group."""

    def __init__(self, timeout_seconds: float) -> None:
        """Start without a deadline.

        Args:
            timeout_seconds: the longest that a call may take while no deadline is set.
        """
        self.deadline: float | None = None
        """Monotonic time by which every later call must end."""
        self._timeout_seconds = timeout_seconds
        self._failure: str | None = None

    def begin(self, what: str, start: Callable[[], Sequence[Any]]) -> Flight:
        """Start work, unless the group has failed or the deadline has passed.

        Raises:
            CollectiveTimeout: no time is left.
            RankFailed: the group has failed before, or a peer is gone.
        """
        self._raise_failure(what)
        began = time.monotonic()
        limit = self._timeout_seconds if self.deadline is None else self.deadline - began
        if limit <= 0:
            raise self._failed(CollectiveTimeout(f"{what}: the deadline passed before it began"))
        try:
            works = tuple(start())
        except RuntimeError as error:  # torch may notice a lost peer at once
            raise self._failed(RankFailed(f"{what}: a peer is gone: {error}")) from error
        return Flight(what, works, limit, began + limit)

    def land(self, flight: Flight) -> None:
        """Wait until work is done.

        Raises:
            CollectiveTimeout: it was not done by its deadline.
            RankFailed: a peer failed, or the group has failed since.
        """
        self._raise_failure(flight.what)
        for work in flight.works:
            try:
                _wait(work, flight)
            except RankFailed as error:
                raise self._failed(error) from error.__cause__

    def _raise_failure(self, what: str) -> None:
        if self._failure is not None:
            raise RankFailed(f"{what}: the group has failed before: {self._failure}")

    def _failed(self, error: RankFailed) -> RankFailed:
        self._failure = str(error)
        return error


def _wait(work: Any, flight: Flight) -> None:
    began = time.monotonic()
    allowed = max(flight.deadline - began, _SHORTEST_WAIT_SECONDS)
    try:
        work.wait(timedelta(seconds=allowed))
    except RuntimeError as error:
        waited = time.monotonic() - began
        # gloo reports both with one class; only the clock tells a limit from a lost peer.
        if waited >= 0.95 * allowed:
            text = f"{flight.what}: not done within {flight.limit:.3f} s"
            raise CollectiveTimeout(text) from error
        text = f"{flight.what}: a peer failed after {waited:.3f} s: {error}"
        raise RankFailed(text) from error
