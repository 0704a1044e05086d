"""Replicas that step together: one alone, or all of them where experts are dealt over them.

A group has as many steps under way as there are pipeline stages. A step ends when it has passed all
stages, and no sooner than a stage's time after the step before it:

    end = max(begin + seconds, end of the step before + pace)

In lockstep the slowest replica's step is everybody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from heddle.simulator.replica import SimulatedReplica, Step

NEVER = float("inf")


class _Round(NamedTuple):
    steps: tuple[Step | None, ...]
    end: float


class Group:
    """Begins steps and ends them.

    Args:
        replicas: that step together; alone, a replica may run through quiet steps at once.
        num_places: steps that may be under way.
        skips: False: quiet steps are made one by one as well.
    """

    def __init__(
        self, replicas: Sequence[SimulatedReplica], num_places: int, *, skips: bool = True
    ) -> None:
        self.replicas = tuple(replicas)
        self._num_places = num_places
        self._skips = skips and num_places == 1 and len(replicas) == 1
        self._under_way: deque[_Round] = deque()
        self._run_end: float | None = None
        self._last_end = 0.0

    @property
    def next_end(self) -> float:
        """When the oldest step, or the run, ends; `NEVER` while nothing is under way."""
        if self._run_end is not None:
            return self._run_end
        return self._under_way[0].end if self._under_way else NEVER

    def begin(self, now: float) -> None:
        """Begin steps until every place is taken, or nothing more can run."""
        while self._run_end is None and len(self._under_way) < self._num_places:
            if self._skips and (end := self.replicas[0].begin_run(now)) is not None:
                self._run_end = end
                return
            steps = tuple(replica.choose(now) for replica in self.replicas)
            prices = [step.price for step in steps if step is not None]
            if not prices:
                return
            seconds = max(price.seconds for price in prices)
            pace = max(price.pace for price in prices)
            soonest = self._last_end + pace if self._num_places > 1 else 0.0
            self._last_end = max(now + seconds, soonest)
            self._under_way.append(_Round(steps, self._last_end))

    def end(self) -> list[int]:
        """End what ends at `next_end`; returns the ids of requests that ended with it."""
        if self._run_end is not None:
            self._last_end, self._run_end = self._run_end, None
            self.replicas[0].end_run()
            return []
        steps, now = self._under_way.popleft()
        ended: list[int] = []
        for replica, step in zip(self.replicas, steps, strict=True):
            if step is not None:
                ended += replica.finish(step, now)
        return ended

    def settle(self, now: float) -> None:
        """Have what has ended accounted for, and the step under way begun like any other."""
        if self._run_end is None:
            return
        self._run_end = None
        step = self.replicas[0].interrupt(now)
        if step is not None:
            self._last_end = step.begin + step.price.seconds
            self._under_way.append(_Round((step,), self._last_end))
