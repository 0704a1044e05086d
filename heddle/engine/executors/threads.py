"""Ranks as threads of one process: for laws and demonstrations, never for speed.

Every rank has one persistent thread with a queue of tasks, because a rank's groups remember which
thread they serve. A rank that raises aborts the group, so that its peers end too instead of waiting
for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import (
    RANK_WORKER,
    RankProgress,
    Worker,
    load_worker_factory,
    progress_of,
)
from heddle.engine.executors.deadline import COLLECTIVE_SHARE
from heddle.engine.executors.failure import Failure, failure_of
from heddle.engine.executors.ledger import StepUnderWay
from heddle.engine.executors.lifecycle import ManagedExecutor
from heddle.engine.executors.waiting import OldestSteps, Roll, Stoppable, await_answers
from heddle.faults.watch import RankWatch, create_watch
from heddle.step.batch import RankReply

if TYPE_CHECKING:
    from heddle.comm.threads import ThreadGroup

_Task = Callable[[int], object]
_SETTLE_SECONDS = 1.0
"""Longest wait, once a rank has failed, for the others to notice."""


class ThreadsExecutor(ManagedExecutor):
    """N ranks in N threads over a `ThreadGroup`."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        worker: str = RANK_WORKER,
        on_progress: RankProgress | None = None,
        closing: threading.Event | None = None,
    ) -> None:
        """Prepare; nothing is loaded before `start`. `closing`: see `create_executor`."""
        super().__init__(resolved)
        self._factory = worker
        self._on_progress = on_progress
        self._closing = closing
        self._workers: dict[int, Worker] = {}
        self._watches: dict[int, RankWatch] = {}
        self._group: ThreadGroup | None = None
        self._tasks: list[queue.SimpleQueue[_Task | None]] = []
        self._desk = _Desk()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers in order of rank, while they run; only to be read between steps."""
        return tuple(self._workers[rank] for rank in sorted(self._workers))

    def _bring_up(self) -> None:
        from heddle.comm.threads import ThreadGroup  # loads torch

        group = self._group = ThreadGroup(self.world_size, self._resolved.step_timeout_seconds)
        factory = load_worker_factory(self._factory)
        for rank in range(self.world_size):
            self._tasks.append(queue.SimpleQueue())
            threading.Thread(
                target=_serve,
                args=(rank, self._resolved.num_threads, self._tasks[rank], self._desk, group),
                name=f"heddle-rank{rank}",
                daemon=True,  # a rank stuck in a C call must not keep the interpreter alive
            ).start()

        def create(rank: int) -> Worker:
            report = progress_of(rank, self._on_progress)
            watch = create_watch(self._resolved.faults, rank, self._resolved.epoch)
            self._watches[rank] = watch
            return factory(self._resolved, rank, group.world(rank), report, watch=watch)

        for tasks in self._tasks:
            tasks.put(create)
        roll: Roll[Worker] = Roll(self.world_size)
        limit = self._resolved.startup_timeout_seconds
        source: Stoppable[Worker] = Stoppable(self._desk, self._closing)
        await_answers(source, roll, time.monotonic() + limit, limit)
        self._workers = dict(enumerate(roll.answers))

    def _send(self, steps: Mapping[int, StepUnderWay]) -> None:
        for replica, step in steps.items():
            for rank in self._ledger.ranks_of(replica):
                self._tasks[rank].put(partial(self._execute, step))

    def _execute(self, step: StepUnderWay, rank: int) -> RankReply:
        """A rank's part of a step, in its own thread."""
        collectives_end = time.monotonic() + COLLECTIVE_SHARE * step.seconds
        return self._workers[rank].execute(step.batch, step.digest, collectives_end)

    def _await(self, replicas: Collection[int]) -> None:
        late = self._ledger.first_late(replicas)
        awaited = OldestSteps(self._ledger, replicas)
        await_answers(self._desk, awaited, late.deadline, late.seconds)

    def _take_down(self) -> None:
        if self._group is not None:
            self._group.abort()  # a rank that still waits for a peer stops waiting
            self._group = None
        for tasks in self._tasks:
            tasks.put(None)
        self._tasks = []
        self._workers = {}


class _Desk:
    """Where the answers of all ranks arrive."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def poll(self, timeout: float) -> list[tuple[int, Any]]:
        """The next answer or failure, if one comes in time."""
        try:
            return [self.answers.get(timeout=timeout)]
        except queue.Empty:
            return []

    def patience(self, failure: Failure) -> float:  # noqa: ARG002 - the same for all
        """How long the others may take to notice."""
        return _SETTLE_SECONDS

    def hung(self, silent: Sequence[int], waited_seconds: float) -> list[Failure]:
        """A failure for each rank that said nothing."""
        text = f"did not answer (limit {waited_seconds:.1f} s); a thread cannot be ended"
        return [Failure(rank=rank, text=text) for rank in silent]


def _serve(
    rank: int,
    num_threads: int,
    tasks: queue.SimpleQueue[_Task | None],
    desk: _Desk,
    group: ThreadGroup,
) -> None:
    """Body of one rank's thread: tasks in, answers out, until None or a failure."""
    import torch

    torch.set_num_threads(num_threads)
    while (task := tasks.get()) is not None:
        try:
            answer = task(rank)
        except BaseException as error:
            failure = failure_of(rank, error)
            _forget_frames(error)
            desk.answers.put((rank, failure))
            group.abort(error, rank)
            return
        desk.answers.put((rank, answer))


def _forget_frames(error: BaseException) -> None:
    """Drop tracebacks that have been told in words: their frames hold the rank's weights and pool,
    and the error lives until new ranks are there.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
