"""Steps of an executor, timed from outside: when each was sent, when its last rank had answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from heddle.engine.executors.base import Executor, Submission
from heddle.step.batch import GlobalBatch, RankReply


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that all its ranks have answered."""

    replica: int
    batch: GlobalBatch
    begin: float
    end: float
    replies: tuple[RankReply, ...]


class WatchedExecutor:
    """Another executor, whose steps are timed."""

    def __init__(self, inner: Executor, clock: Callable[[], float]) -> None:
        self._inner, self._clock = inner, clock
        self._under_way: dict[int, deque[tuple[GlobalBatch, float]]] = {}
        self.ended: EndedStep | None = None
        """The step that was collected last."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._inner.world_size

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the ranks; empty where they are none, or not on this host."""
        found: tuple[int, ...] = getattr(self._inner, "pids", ())
        return found

    def start(self) -> None:
        """Passed on."""
        self._inner.start()

    def submit(self, batches: Mapping[int, Submission]) -> None:
        """Passed on; the step begins now."""
        begin = self._clock()
        self._inner.submit(batches)
        for replica, (batch, _) in batches.items():
            self._under_way.setdefault(replica, deque()).append((batch, begin))

    def first_done(self) -> int:
        """Passed on."""
        return self._inner.first_done()

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        """Passed on; the step has ended then."""
        replies = self._inner.collect(replica)
        batch, begin = self._under_way[replica].popleft()
        self.ended = EndedStep(replica, batch, begin, self._clock(), replies)
        return replies

    def execute(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        """`submit`, then `collect`, of replica 0."""
        self.submit({0: (batch, digest)})
        return self.collect(0)

    def close(self) -> None:
        """Passed on."""
        self._inner.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
