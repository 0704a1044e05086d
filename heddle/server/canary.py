"""One token through every rank that has nothing to do, to see that it still can.

Canaries (`heddle.engine.recovery.canary`) are given to replicas without work alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from heddle.engine.driver import Driver
from heddle.engine.recovery.canary import FIRST_ID, create_canary
from heddle.engine.replica import Replica
from heddle.errors import NumericsError, PlanMismatch, RankFailed
from heddle.scheduler.batch import ScheduledBatch
from heddle.scheduler.request import Request, RequestStatus


class Canaries:
    """Those of one engine. Belongs to the thread that steps it."""

    def __init__(self, driver: Driver, last_end: Callable[[int], float]) -> None:
        """Begin with none.

        Args:
            driver: of the engine.
            last_end: by replica, when its ranks last had all answered a step.
        """
        self._driver, self._last_end = driver, last_end
        self._open: dict[int, Request] = {}
        """By replica."""
        self._num_made = 0
        self._epoch = driver.resolved.epoch

    def proven(self) -> float:
        """Time since which every rank has answered a step; any thread may ask."""
        return min(self._last_end(replica.index) for replica in self._driver.replicas)

    def prove(self, since: float) -> bool:
        """Do something towards a step of every replica that ends after `since`; takes a step's time
        at most.

        Returns:
            True once all have; else to be called again a little later.
        Raises:
            NumericsError: a canary came to NaN or inf.
            RankFailed: a step failed, and with it the engine.
        """
        if self._epoch != self._driver.resolved.epoch:  # canaries are not replayed
            self._epoch = self._driver.resolved.epoch
            self._open.clear()
        for replica in self._driver.replicas:
            is_idle = not replica.scheduler.has_work
            if is_idle and self._last_end(replica.index) < since:
                self._release(replica)
        if self._open and not self._driver.has_work:  # else it is stepped for its requests
            self._step()
        self._collect()
        return self.proven() >= since

    def num_open(self, replica: int, status: RequestStatus) -> int:
        """How many the scheduler of a replica counts among its own; any thread may ask."""
        canary = self._open.get(replica)
        return int(canary is not None and canary.status is status)

    def _step(self) -> None:
        try:
            self._driver.step()
        except PlanMismatch as mismatch:  # no matter of this call alone: the engine has ended
            raise RankFailed(str(mismatch)) from mismatch

    def _release(self, replica: Replica) -> None:
        canary = create_canary(replica, self._num_made)
        self._num_made += 1
        self._open[replica.index] = canary
        replica.admit(canary, ())

    def _collect(self) -> None:
        """Let go of those that have ended."""
        ended = {index: each for index, each in self._open.items() if each.is_finished}
        for index, canary in ended.items():
            del self._open[index]
            self._driver.replicas[index].forget(canary)
        if any(canary.finish_reason == "error" for canary in ended.values()):
            raise NumericsError("a canary came to NaN or inf")


def without_canaries(scheduled: ScheduledBatch) -> ScheduledBatch:
    """What of a step counts as work for requests."""
    parts = tuple(part for part in scheduled.parts if part.request.request_id < FIRST_ID)
    if len(parts) == len(scheduled.parts):
        return scheduled
    return dataclasses.replace(scheduled, parts=parts)
