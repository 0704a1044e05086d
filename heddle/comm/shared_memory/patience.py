"""How a rank waits for another one: it spins, then yields, then sleeps.

A merge between ranks that keep pace is over within microseconds, which no sleep can hit; so the
first looks are free of system calls. Then both ranks may sit on one core: `sched_yield` hands it
over, but each such turn costs as much as several merges. A sleeper that wakes is put on a core that
is free, so sleeps follow soon; the first are as short as the clock allows, later ones an eighth of
what has been waited, which costs the others nothing and us little. (Linux rounds sleeps up by 50
microseconds unless it is asked not to.) Where ranks outnumber cores, looks in vain are spared.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from heddle.comm.shared_memory.roll import Roll
from heddle.errors import CollectiveTimeout

SPINS = 300
"""Looks of about 60 ns each."""
_YIELDS = 2
_CHECK_EVERY = 16
_SHORTEST_SLEEP_SECONDS = 5e-6
_LONGEST_SLEEP_SECONDS = 1e-3
_SHARE_OF_WAIT = 8
_PR_SET_TIMERSLACK = 29
_SLACK_NANOSECONDS = 1000


class Until(NamedTuple):
    """The end of one call's patience."""

    rank: int
    """Global rank that waits."""
    deadline: float
    """Monotonic time."""
    limit: str
    """Names the deadline in the error."""


class Patience:
    """The waiting of one rank, over all its groups."""

    def __init__(self, roll: Roll, *, is_crowded: bool) -> None:
        """Know the ranks.

        Args:
            roll: tells who has failed.
            is_crowded: more ranks than cores.
        """
        self._roll = roll
        self.spins = 1 if is_crowded else SPINS
        self.chores: list[Callable[[], None]] = []
        """Called while waiting: transfers of this rank that others may wait for."""

    def wait(
        self,
        is_ready: Callable[[], bool],
        what: Callable[[], str],
        missing: Callable[[], Iterable[int]],
        until: Until,
    ) -> None:
        """Return once `is_ready()`.

        Args:
            is_ready: looks at shared memory.
            what: names the call.
            missing: ranks that are waited for.
            until: when to give up.

        Raises:
            CollectiveTimeout: the deadline has passed.
            PlanMismatch, RankFailed: the world has failed, or a rank that is missing is gone.
        """
        looks, began = 0, time.monotonic()
        while not is_ready():
            looks += 1
            for chore in self.chores:
                chore()
            if looks % _CHECK_EVERY == 0:
                self._check(what, missing, until)
            if looks <= _YIELDS:
                os.sched_yield()
            else:
                nap = (time.monotonic() - began) / _SHARE_OF_WAIT
                time.sleep(min(max(nap, _SHORTEST_SLEEP_SECONDS), _LONGEST_SLEEP_SECONDS))

    def _check(
        self, what: Callable[[], str], missing: Callable[[], Iterable[int]], until: Until
    ) -> None:
        self._roll.check(what())
        self._roll.check_peers(what(), missing())
        if time.monotonic() > until.deadline:
            raise self._late(what(), list(missing()), until)

    def _late(self, what: str, missing: list[int], until: Until) -> Exception:
        return self._roll.fail(
            CollectiveTimeout(
                f"{what}: rank {until.rank} waited until {until.limit}; missing ranks: {missing}"
            )
        )


def sharpen_sleeps() -> None:
    """Let sleeps of this thread end when they should; where that is refused they are longer."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)
