"""Ranks as processes of this host, which may die or hang without taking the driver along.

The driver awaits replies, ends of processes and the step's deadline together, so any failure is
noticed by whichever shows first, and named by its first cause:

    a rank raised             -> its own words, at once
    a process ended           -> its signal or exit code and last output, at once
    a peer was lost           -> the rank that ends, or stays silent, a moment later
    a collective timed out    -> the rank that stays silent until the deadline, with its stacks
    nothing by the deadline   -> the same
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from heddle.comm.shared_memory.segment import create_segment
from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import RANK_WORKER, RankProgress
from heddle.engine.executors.black_box import with_standings
from heddle.engine.executors.deadline import COLLECTIVE_SHARE
from heddle.engine.executors.failure import Failure, describe_rank
from heddle.engine.executors.frames import encode_frame
from heddle.engine.executors.launcher import RankLauncher, modules_to_warm
from heddle.engine.executors.ledger import StepUnderWay
from heddle.engine.executors.lifecycle import ManagedExecutor, RanksFailed
from heddle.engine.executors.messages import Failed, FromRank, Progress, Ready, Reply, Start, Step
from heddle.engine.executors.ranks import Ended, RankProcesses, Ranks
from heddle.engine.executors.run_folder import run_folder
from heddle.engine.executors.waiting import Awaited, OldestSteps, Roll, Stoppable, await_answers
from heddle.faults.page import Standing
from heddle.step.batch import RankReply
from heddle.step.identity import identity_of

_SETTLE_SECONDS = 0.5
"""After a lost peer: how long its end may take to be seen. It takes about 10 ms."""

_T = TypeVar("_T")


class ProcessesExecutor(ManagedExecutor):
    """One process per rank; nothing of them is left after `close`, however it comes about."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        worker: str = RANK_WORKER,
        on_progress: RankProgress | None = None,
        launcher: RankLauncher | None = None,
        closing: threading.Event | None = None,
    ) -> None:
        """Prepare; no process starts before `start`.

        Args:
            resolved: what will run.
            worker: factory of a rank's worker.
            on_progress: told (rank, done, total) while weights load.
            launcher: a warm launcher to use and leave running; None: one of its own.
            closing: see `create_executor`.
        """
        super().__init__(resolved)
        self._factory = worker
        self._on_progress = on_progress
        self._launcher = launcher
        self._closing = closing
        self._ranks: Ranks | None = None
        self._end_ranks: Callable[[], object] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, while they run."""
        return () if self._ranks is None else self._ranks.pids

    def _bring_up(self) -> None:
        limit = self._resolved.startup_timeout_seconds
        deadline = time.monotonic() + limit
        labels = [describe_rank(self._resolved.parallel, rank) for rank in range(self.world_size)]
        ranks = self._ranks = self._create_ranks(labels)
        # Ends the ranks also when this executor is dropped, and when the interpreter exits.
        self._end_ranks = weakref.finalize(self, ranks.close)
        ranks.set_epoch(self._resolved.epoch)
        ranks.launch(deadline)
        # Private to this user (0700). Ranks find each other through it and are connected from then
        # on; if the driver dies before it removes the folder, they do.
        with run_folder() as folder:
            for rank in range(self.world_size):
                ranks.send(rank, encode_frame(self._start_of(rank, folder)))
            source = _Events(ranks, _ready_of, self._on_progress)
            roll: Roll[Ready] = Roll(self.world_size)
            _await_or_kill(self._resolved, ranks, source, roll, deadline, limit, self._closing)
        ranks.is_idle = True

    def _start_of(self, rank: int, folder: str) -> Start:
        """The first message to a rank; `folder` is private to the ranks of this host."""
        identity = identity_of(self._resolved)
        return Start(self._resolved, rank, self._factory, folder, identity=identity)

    def _create_ranks(self, labels: Sequence[str]) -> Ranks:
        """The ranks, not launched, and the memory that they will share."""
        backend = self._resolved.cpu_comm_backend or "gloo"  # unnamed: made without `resolve`
        launcher = self._launcher or RankLauncher(warm_modules=modules_to_warm(backend))
        segment = create_segment(self.world_size) if backend == "shm" else None
        return RankProcesses(labels, launcher, self._launcher is None, segment)

    def _send(self, steps: Mapping[int, StepUnderWay]) -> None:
        ranks = self._running()
        ranks.is_idle = False
        for replica, step in steps.items():
            ranks.set_epoch(step.batch.epoch)
            frame = encode_frame(Step(step.batch, step.digest, COLLECTIVE_SHARE * step.seconds))
            for rank in self._ledger.ranks_of(replica):
                ranks.send(rank, frame)

    def _await(self, replicas: Collection[int]) -> None:
        ranks = self._running()
        late = self._ledger.first_late(replicas)
        awaited = OldestSteps(self._ledger, replicas)
        source = _Events(ranks, _reply_of)
        _await_or_kill(self._resolved, ranks, source, awaited, late.deadline, late.seconds)

    def _look(self) -> Sequence[Failure]:
        ranks = self._running()
        found = [event for _, event in _Events(ranks, _reply_of).poll(0)]
        failures = [event for event in found if isinstance(event, Failure)]
        if not failures:
            return []
        standings = ranks.standings()
        ranks.kill()
        return with_standings(self._resolved, _with_last_words(ranks, failures), standings)

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        """End the oldest step of a replica; see `Executor.collect`."""
        replies = super().collect(replica)
        self._running().is_idle = self._ledger.is_idle
        return replies

    def _take_down(self) -> None:
        if self._end_ranks is not None:
            self._end_ranks()
        self._ranks = None

    def _running(self) -> Ranks:
        assert self._ranks is not None  # set by every successful start
        return self._ranks


class _Events(Generic[_T]):
    """What comes of rank processes, as answers of one kind and failures."""

    def __init__(
        self,
        ranks: Ranks,
        answer_of: Callable[[FromRank | Ended], _T | None],
        on_progress: RankProgress | None = None,
    ) -> None:
        """Read events.

        Args:
            ranks: where they come from.
            answer_of: the answer that an event is; None for any other event.
            on_progress: told (rank, done, total).
        """
        self._ranks = ranks
        self._answer_of = answer_of
        self._on_progress = on_progress
        self.standings: list[Standing] = []
        """Where ranks stood when some of them counted as hung; empty: none did."""

    def poll(self, timeout: float) -> Iterator[tuple[int, _T | Failure]]:
        """Answers, and whatever else came instead of one."""
        for rank, event in self._ranks.poll(timeout):
            answer = self._answer_of(event)
            if answer is not None:
                yield rank, answer
            elif not isinstance(event, Progress):
                yield rank, _failure(rank, event)
            elif self._on_progress is not None:
                self._on_progress(rank, event.done, event.total)

    def patience(self, failure: Failure) -> float:
        """How long to wait, after a failure, for one that explains it."""
        if not failure.is_derived:
            return 0.0
        # A timeout is explained by a rank that stays silent until the step's own deadline.
        return float("inf") if failure.is_timeout else _SETTLE_SECONDS

    def hung(self, silent: Sequence[int], waited_seconds: float) -> list[Failure]:
        """A failure for each rank that neither answered nor ended, with its stacks; the one that
        holds up the others comes first.
        """
        # Before the stacks: a stopped rank is resumed for these.
        self.standings = self._ranks.standings()
        progress = {standing.rank: standing.progress for standing in self.standings}
        stacks = self._ranks.dump_stacks() if silent else {}
        return [
            Failure(
                rank=rank,
                text=f"it did not answer within {waited_seconds:.1f} s",
                detail=stacks.get(rank, "no stacks: the process does not react to signals"),
            )
            for rank in sorted(silent, key=lambda rank: progress.get(rank, (0, 0, 0)))
        ]


def _ready_of(event: FromRank | Ended) -> Ready | None:
    return event if isinstance(event, Ready) else None


def _reply_of(event: FromRank | Ended) -> RankReply | None:
    return event.reply if isinstance(event, Reply) else None


def _failure(rank: int, event: FromRank | Ended) -> Failure:
    """What an event other than the expected one means."""
    if isinstance(event, Failed):
        return event.failure(rank)
    if isinstance(event, Ended):
        return Failure(rank=rank, text=event.why or _describe_end(event.exit_code))
    return Failure(rank=rank, text=f"it sent {type(event).__name__} out of turn")


def _describe_end(exit_code: int | None) -> str:
    if exit_code is None:
        return "the launcher of its process ended, and the process with it"
    if exit_code >= 0:
        return f"its process exited with code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; SIGKILL from outside usually means out of memory" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{hint}"


def _await_or_kill(
    resolved: ResolvedConfig,
    ranks: Ranks,
    source: _Events[_T],
    awaited: Awaited[_T],
    deadline: float,
    limit_seconds: float,
    closing: threading.Event | None = None,
) -> None:
    """`await_answers`; when it fails, all ranks are killed, which makes their last words whole."""
    try:
        await_answers(Stoppable(source, closing), awaited, deadline, limit_seconds)
    except RanksFailed as failed:
        standings = source.standings or ranks.standings()
        ranks.kill()
        failures = _with_last_words(ranks, failed.failures)
        raise RanksFailed(with_standings(resolved, failures, standings)) from None


def _with_last_words(ranks: Ranks, failures: Sequence[Failure]) -> list[Failure]:
    """Where a rank told nothing of its failure, what it wrote before; all ranks have ended."""
    return [
        failure
        if failure.detail
        else dataclasses.replace(failure, detail=ranks.last_words(failure.rank))
        for failure in failures
    ]
