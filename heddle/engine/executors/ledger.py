"""Which steps are under way on which ranks, and which replies have come.

Replicas advance by themselves. Each has a queue of steps, which its ranks work off in order: the
i-th reply of a rank answers the i-th step of its replica, and the oldest step is done once all its
ranks have answered it.

    replica 0    steps s4 s5    replies of ranks 0..3: 2 1 2 1    s4 is done
    replica 1    steps s4       replies of ranks 4..7: 0 1 1 1    rank 4 owes s4

A step may take the sum of what it and the steps before it may take, because a stage of a pipeline
waits for its neighbours' earlier steps too. Its time counts from when it became the oldest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from heddle.engine.executors.base import Submission
from heddle.engine.executors.deadline import StepDeadline, StepWork
from heddle.errors import HeddleError
from heddle.step.batch import GlobalBatch, RankReply


@dataclass(slots=True)
class StepUnderWay:
    """A step that was submitted and not collected."""

    batch: GlobalBatch
    digest: int
    work: StepWork
    seconds: float
    """Longest time from when it became the oldest of its replica."""
    order: int
    """Rounds of submissions before its own."""
    submitted_at: float
    oldest_since: float | None = None

    @property
    def deadline(self) -> float:
        """Monotonic time by which it must be done; infinite while others stand before it."""
        return float("inf") if self.oldest_since is None else self.oldest_since + self.seconds


class StepLedger:
    """Bookkeeping of all replicas of one executor; talks to nobody."""

    def __init__(
        self,
        ranks_of: Sequence[Sequence[int]],
        limit_seconds: float,
        *,
        in_lockstep: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without any step.

        Args:
            ranks_of: global ranks of each replica.
            limit_seconds: longest time of one step.
            in_lockstep: replicas wait for each other within a step, so one may take as long as all.
            clock: monotonic seconds.
        """
        self._ranks_of = [tuple(ranks) for ranks in ranks_of]
        self._replica_of = {rank: r for r, ranks in enumerate(ranks_of) for rank in ranks}
        self._in_lockstep = in_lockstep
        self._clock = clock
        self._deadline = StepDeadline(limit_seconds)
        self._steps: list[deque[StepUnderWay]] = [deque() for _ in ranks_of]
        self._replies: dict[int, deque[RankReply]] = {rank: deque() for rank in self._replica_of}
        self._num_rounds = 0

    @property
    def num_replicas(self) -> int:
        """Replicas of the engine."""
        return len(self._ranks_of)

    @property
    def is_idle(self) -> bool:
        """No step is under way."""
        return not any(self._steps)

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """Global ranks of a replica."""
        return self._ranks_of[replica]

    def busy_replicas(self) -> tuple[int, ...]:
        """Replicas with a step under way."""
        return tuple(r for r, steps in enumerate(self._steps) if steps)

    def submit(self, batches: Mapping[int, Submission]) -> dict[int, StepUnderWay]:
        """Queue one step of each named replica.

        Raises:
            ValueError: there is no such replica.
        """
        for replica in batches:
            if not 0 <= replica < self.num_replicas:
                raise ValueError(f"replica {replica}; must be in [0, {self.num_replicas})")
        works = {replica: StepWork.of(batch) for replica, (batch, _) in batches.items()}
        if self._in_lockstep:  # even one without rows waits for the rows of the others
            works = dict.fromkeys(works, _total(works.values()))
        steps = {}
        for replica, (batch, digest) in batches.items():
            steps[replica] = self._queue(replica, batch, digest, works[replica])
        self._num_rounds += 1
        return steps

    def _queue(self, replica: int, batch: GlobalBatch, digest: int, work: StepWork) -> StepUnderWay:
        queue, now = self._steps[replica], self._clock()
        before = sum(self._deadline.seconds(step.work) for step in queue)
        step = StepUnderWay(
            batch=batch,
            digest=digest,
            work=work,
            seconds=before + self._deadline.seconds(work),
            order=self._num_rounds,
            submitted_at=now,
            oldest_since=None if queue else now,
        )
        queue.append(step)
        return step

    def add(self, rank: int, reply: RankReply) -> None:
        """Take in the next reply of a rank.

        Raises:
            HeddleError: the rank has answered all its steps already.
        """
        if not self._owes(rank):
            raise HeddleError(f"rank {rank} sent a reply that no step waits for")
        self._replies[rank].append(reply)

    def first_done(self, replicas: Iterable[int]) -> int | None:
        """Of these replicas, the one whose oldest step is done, and was submitted first."""
        done = [replica for replica in replicas if self._is_done(replica)]
        return min(done, key=lambda replica: self._steps[replica][0].order, default=None)

    def oldest(self, replicas: Iterable[int]) -> int:
        """Of these replicas, the one whose oldest step was submitted first.

        Raises:
            ValueError: none of them has a step under way.
        """
        busy = [replica for replica in replicas if self._steps[replica]]
        if not busy:
            raise ValueError("no step is under way, so there is nothing to wait for")
        return min(busy, key=lambda replica: self._steps[replica][0].order)

    def head(self, replica: int) -> StepUnderWay:
        """The oldest step of a replica that has one."""
        return self._steps[replica][0]

    def take(self, replica: int) -> tuple[StepUnderWay, tuple[RankReply, ...]]:
        """Remove the oldest step of a replica, which is done; its replies in order of rank."""
        assert self._is_done(replica), "wait for the step first"
        now = self._clock()
        step = self._steps[replica].popleft()
        replies = tuple(self._replies[rank].popleft() for rank in self._ranks_of[replica])
        # Counted from its submission, so waiting for its turn is part of it: never below its cost.
        self._deadline.observe(step.work, now - step.submitted_at)
        if self._steps[replica]:
            self._steps[replica][0].oldest_since = now
        return step, replies

    def step_of(self, rank: int) -> StepUnderWay | None:
        """The step that a rank works on; None if it has answered all."""
        steps = self._steps[self._replica_of[rank]]
        done = len(self._replies[rank])
        return steps[done] if done < len(steps) else None

    def first_late(self, replicas: Iterable[int]) -> StepUnderWay:
        """The oldest step of the one of these replicas whose deadline comes first."""
        heads = [self.head(replica) for replica in replicas if self._steps[replica]]
        return min(heads, key=lambda step: step.deadline)

    def owing(self, replicas: Iterable[int], failed: Collection[int] = ()) -> set[int]:
        """Ranks whose answer is awaited, for a list of those that are silent.

        Args:
            replicas: awaited; only those that are late count, if one is.
            failed: ranks that have failed; then the ranks that work with them count instead.
        """
        now = self._clock()
        late = [r for r in replicas if self._steps[r] and self.head(r).deadline <= now]
        involved = {self._replica_of[rank] for rank in failed} or set(late) or set(replicas)
        if self._in_lockstep:
            involved = set(range(self.num_replicas))
        return {
            rank for replica in involved for rank in self._ranks_of[replica] if self._owes(rank)
        }

    def _owes(self, rank: int) -> bool:
        return self.step_of(rank) is not None

    def _is_done(self, replica: int) -> bool:
        return bool(self._steps[replica]) and all(
            self._replies[rank] for rank in self._ranks_of[replica]
        )


def _total(works: Iterable[StepWork]) -> StepWork:
    works = tuple(works)
    return StepWork(sum(work.rows for work in works), sum(work.pairs for work in works))
