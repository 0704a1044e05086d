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
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import RANK_WORKER, RankProgress
from heddle.engine.executors.deadline import COLLECTIVE_SHARE, StepDeadline, StepWork
from heddle.engine.executors.failure import Failure, describe_rank
from heddle.engine.executors.frames import encode_frame
from heddle.engine.executors.launcher import RankLauncher
from heddle.engine.executors.lifecycle import ManagedExecutor, RanksFailed
from heddle.engine.executors.messages import Failed, FromRank, Progress, Ready, Reply, Start, Step
from heddle.engine.executors.ranks import Ended, RankProcesses
from heddle.step.batch import GlobalBatch, RankReply

_SETTLE_SECONDS = 0.5
"""After a lost peer: how long its end may take to be seen. It takes about 10 ms."""

_Expected = TypeVar("_Expected", Ready, Reply)


class ProcessesExecutor(ManagedExecutor):
    """One process per rank; nothing of them is left after `close`, however it comes about."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        worker: str = RANK_WORKER,
        on_progress: RankProgress | None = None,
        launcher: RankLauncher | None = None,
    ) -> None:
        """Prepare; no process starts before `start`.

        Args:
            resolved: what will run.
            worker: factory of a rank's worker.
            on_progress: told (rank, done, total) while weights load.
            launcher: a warm launcher to use and leave running; None: one of its own.
        """
        super().__init__(resolved)
        self._factory = worker
        self._on_progress = on_progress
        self._launcher = launcher
        self._deadline = StepDeadline(resolved.step_timeout_seconds)
        self._ranks: RankProcesses | None = None
        self._end_ranks: Callable[[], object] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, while they run."""
        return () if self._ranks is None else self._ranks.pids

    def _bring_up(self) -> None:
        limit = self._resolved.startup_timeout_seconds
        deadline = time.monotonic() + limit
        labels = [describe_rank(self._resolved.parallel, rank) for rank in range(self.world_size)]
        ranks = self._ranks = RankProcesses(
            labels, self._launcher or RankLauncher(), owns_launcher=self._launcher is None
        )
        # Ends the ranks also when this executor is dropped, and when the interpreter exits.
        self._end_ranks = weakref.finalize(self, ranks.close)
        ranks.launch(deadline)
        # Private to this user (0700). Ranks find each other through it and are connected from then
        # on; if the driver dies before it removes the folder, they do.
        with tempfile.TemporaryDirectory(prefix="heddle-", ignore_cleanup_errors=True) as folder:
            for rank in range(self.world_size):
                start = Start(self._resolved, rank, self._factory, folder)
                ranks.send(rank, encode_frame(start))
            self._collect(ranks, Ready, deadline, limit)
        ranks.is_idle = True

    def _run(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        ranks = self._ranks
        assert ranks is not None  # set by every successful start
        work = StepWork.of(batch)
        limit = self._deadline.seconds(work)
        started = time.monotonic()
        frame = encode_frame(Step(batch, digest, COLLECTIVE_SHARE * limit))
        ranks.is_idle = False
        ranks.set_epoch(batch.epoch)
        for rank in range(self.world_size):
            ranks.send(rank, frame)
        replies = self._collect(ranks, Reply, started + limit, limit)
        ranks.is_idle = True
        self._deadline.observe(work, time.monotonic() - started)
        return tuple(reply.reply for reply in replies)

    def _take_down(self) -> None:
        if self._end_ranks is not None:
            self._end_ranks()
        self._ranks = None

    def _collect(
        self, ranks: RankProcesses, expected: type[_Expected], deadline: float, limit: float
    ) -> list[_Expected]:
        """One `expected` message of every rank, in order of rank.

        Raises:
            RanksFailed: something else came of a rank, or nothing; all ranks are killed by then.
        """
        answers: dict[int, _Expected] = {}
        failures: dict[int, Failure] = {}
        give_up = deadline
        while len(answers) + len(failures) < self.world_size:
            remaining = give_up - time.monotonic()
            if remaining <= 0:
                break
            for rank, event in ranks.poll(remaining):
                if isinstance(event, expected) and rank not in failures:
                    answers[rank] = event
                elif isinstance(event, Progress):
                    self._report(rank, event)
                elif rank not in failures:  # a rank that has failed ends too; that is no news
                    answers.pop(rank, None)
                    failures[rank] = _failure(rank, event)
                    give_up = min(give_up, time.monotonic() + _patience(failures[rank]))
        if len(answers) == self.world_size:
            return [answers[rank] for rank in range(self.world_size)]
        silent = set(range(self.world_size)) - answers.keys() - failures.keys()
        found = list(failures.values())
        if all(failure.is_derived for failure in found):
            found += _hung(ranks, sorted(silent), limit - max(0.0, deadline - time.monotonic()))
        ranks.kill()
        raise RanksFailed(
            [
                failure
                if failure.detail
                else dataclasses.replace(failure, detail=ranks.last_words(failure.rank))
                for failure in found
            ]
        )

    def _report(self, rank: int, progress: Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(rank, progress.done, progress.total)


def _patience(failure: Failure) -> float:
    """How long to wait, after a failure, for one that explains it."""
    if not failure.is_derived:
        return 0.0
    # A timeout is explained by a rank that stays silent until the step's own deadline.
    return float("inf") if failure.is_timeout else _SETTLE_SECONDS


def _failure(rank: int, event: FromRank | Ended) -> Failure:
    """What an event other than the expected one means."""
    if isinstance(event, Failed):
        return event.failure(rank)
    if isinstance(event, Ended):
        return Failure(rank=rank, text=_describe_end(event.exit_code))
    return Failure(rank=rank, text=f"it sent {type(event).__name__} out of turn")


def _describe_end(exit_code: int | None) -> str:
    if exit_code is None:
        return "the launcher of its process ended, and the process with it"
    if exit_code >= 0:
        return f"its process exited with code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; SIGKILL from outside usually means out of memory" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{hint}"


def _hung(ranks: RankProcesses, silent: list[int], waited: float) -> list[Failure]:
    """A failure for each rank that neither answered nor ended, with its stacks."""
    stacks = ranks.dump_stacks() if silent else {}
    return [
        Failure(
            rank=rank,
            text=f"it did not answer within {waited:.1f} s",
            detail=stacks.get(rank, "no stacks: the process does not react to signals"),
        )
        for rank in silent
    ]
