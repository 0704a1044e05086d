"""Ranks as threads of one process: for laws and demonstrations, never for speed.

Every rank has one persistent thread, because a rank's groups remember which thread they serve. A
rank that raises aborts the group, so that its peers end too instead of waiting for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import (
    RANK_WORKER,
    RankProgress,
    Worker,
    load_worker_factory,
    progress_of,
)
from heddle.engine.executors.deadline import COLLECTIVE_SHARE, StepDeadline, StepWork
from heddle.engine.executors.failure import Failure, failure_of
from heddle.engine.executors.lifecycle import ManagedExecutor, RanksFailed
from heddle.step.batch import GlobalBatch, RankReply

if TYPE_CHECKING:
    from heddle.comm.threads import ThreadGroup

_T = TypeVar("_T")
_Task = Callable[[int], object]
_SETTLE_SECONDS = 1.0
"""Longest wait, once a rank has failed, for the others to notice."""


class _Answer(Generic[_T]):
    """What one rank made of a task."""

    def __init__(self, rank: int, value: _T | None, failure: Failure | None) -> None:
        self.rank = rank
        self.value = value
        self.failure = failure


class ThreadsExecutor(ManagedExecutor):
    """N ranks in N threads over a `ThreadGroup`."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        worker: str = RANK_WORKER,
        on_progress: RankProgress | None = None,
    ) -> None:
        """Prepare; nothing is loaded before `start`."""
        super().__init__(resolved)
        self._factory = worker
        self._on_progress = on_progress
        self._deadline = StepDeadline(resolved.step_timeout_seconds)
        self._workers: dict[int, Worker] = {}
        self._group: ThreadGroup | None = None
        self._tasks: list[queue.SimpleQueue[_Task | None]] = []
        self._answers: queue.SimpleQueue[_Answer[object]] = queue.SimpleQueue()

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
                args=(rank, self._resolved.num_threads, self._tasks[rank], self._answers, group),
                name=f"heddle-rank{rank}",
                daemon=True,  # a rank stuck in a C call must not keep the interpreter alive
            ).start()

        def create(rank: int) -> Worker:
            report = progress_of(rank, self._on_progress)
            return factory(self._resolved, rank, group.world(rank), report)

        workers = self._on_all_ranks(create, self._resolved.startup_timeout_seconds)
        self._workers = dict(enumerate(workers))

    def _run(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        work = StepWork.of(batch)
        limit = self._deadline.seconds(work)
        started = time.monotonic()
        collectives_end = started + COLLECTIVE_SHARE * limit

        def run(rank: int) -> RankReply:
            return self._workers[rank].execute(batch, digest, collectives_end)

        replies = self._on_all_ranks(run, limit)
        self._deadline.observe(work, time.monotonic() - started)
        return tuple(replies)

    def _take_down(self) -> None:
        if self._group is not None:
            self._group.abort()  # a rank that still waits for a peer stops waiting
            self._group = None
        for tasks in self._tasks:
            tasks.put(None)
        self._tasks = []
        self._workers = {}

    def _on_all_ranks(self, task: Callable[[int], _T], limit_seconds: float) -> list[_T]:
        """Results of `task(rank)` in order of rank; `RanksFailed` when one raises or is late."""
        for tasks in self._tasks:
            tasks.put(task)
        pending = set(range(self.world_size))
        results: dict[int, _T] = {}
        failures: list[Failure] = []
        deadline = time.monotonic() + limit_seconds
        while pending:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            pending.discard(answer.rank)
            if answer.failure is None:
                results[answer.rank] = answer.value  # type: ignore[assignment]
            else:
                failures.append(answer.failure)
                deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
        if pending and (not failures or all(failure.is_timeout for failure in failures)):
            text = f"did not answer (limit {limit_seconds:.1f} s); a thread cannot be ended"
            failures += [Failure(rank=rank, text=text) for rank in sorted(pending)]
        if failures:
            raise RanksFailed(failures)
        return [results[rank] for rank in range(self.world_size)]


def _serve(
    rank: int,
    num_threads: int,
    tasks: queue.SimpleQueue[_Task | None],
    answers: queue.SimpleQueue[_Answer[object]],
    group: ThreadGroup,
) -> None:
    """Body of one rank's thread: tasks in, answers out, until None."""
    import torch

    torch.set_num_threads(num_threads)
    while (task := tasks.get()) is not None:
        try:
            answer = _Answer[object](rank, task(rank), None)
        except BaseException as error:
            answer = _Answer[object](rank, None, failure_of(rank, error))
            group.abort(error, rank)
        answers.put(answer)
