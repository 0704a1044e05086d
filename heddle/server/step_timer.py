"""Steps of an executor, timed from outside: when each was sent, when its last rank had answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from heddle.engine.executors.base import Executor, Submission
from heddle.engine.executors.wrapped import WrappedExecutor
from heddle.step.batch import GlobalBatch, RankReply


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that all its ranks have answered."""

    replica: int
    batch: GlobalBatch
    begin: float
    end: float
    replies: tuple[RankReply, ...]


class WatchedExecutor(WrappedExecutor):
    """Another executor, whose steps are timed."""

    def __init__(self, inner: Executor, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._clock = clock
        self._under_way: dict[int, deque[tuple[GlobalBatch, float]]] = {}
        self.ended: EndedStep | None = None
        """The step that was collected last."""
        self._last_ends: dict[int, float] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the ranks; empty where they are none, or not on this host."""
        found: tuple[int, ...] = getattr(self.inner, "pids", ())
        return found

    def last_end(self, replica: int) -> float:
        """When the ranks of a replica last had all answered a step; -inf: never."""
        return self._last_ends.get(replica, float("-inf"))

    def submit(self, batches: Mapping[int, Submission]) -> None:
        """Passed on; the step begins now."""
        begin = self._clock()
        self.inner.submit(batches)
        for replica, (batch, _) in batches.items():
            self._under_way.setdefault(replica, deque()).append((batch, begin))

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        """Passed on; the step has ended then."""
        replies = self.inner.collect(replica)
        batch, begin = self._under_way[replica].popleft()
        end = self._last_ends[replica] = self._clock()
        self.ended = EndedStep(replica, batch, begin, end, replies)
        return replies
