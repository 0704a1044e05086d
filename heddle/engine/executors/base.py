"""What a driver asks of its ranks, and what an executor asks of one rank.

An executor starts one worker per rank. For each step of a replica it hands the same `GlobalBatch`
to every worker of that replica, and returns all their replies or the first cause of their absence.
Nothing of a step is returned unless all its ranks agree.

    submit({0: step, 1: step})    returns at once
    submit({0: next step})        a pipeline begins it while later stages work on the one before
    first_done() -> 1             whichever replica is quicker
    collect(1), collect(0), ...   oldest step first
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from heddle.config.engine import ResolvedConfig
from heddle.errors import PlanMismatch
from heddle.faults.watch import RankWatch
from heddle.step.batch import GlobalBatch, RankReply

if TYPE_CHECKING:  # importing the protocol loads torch, which a driver of processes never needs
    from heddle.comm.base import World

RANK_WORKER = "heddle.runner.worker:RankWorker"
"""The worker of every rank, as `module:attribute`: rank processes import it themselves."""

Submission = tuple[GlobalBatch, int]
"""A step of one replica: its batch, and the digest of the driver's plan of it. A rank that derives
another plan refuses to run.
"""

RankProgress = Callable[[int, int, int], None]
"""(rank, done, total): weights loaded so far."""


class Worker(Protocol):
    """One rank: its weights, its share of the KV pool, its groups."""

    def execute(self, batch: GlobalBatch, digest: int, deadline: float | None) -> RankReply:
        """Run one step; collectives end by `deadline` (monotonic seconds)."""
        ...


class WorkerFactory(Protocol):
    """Makes a worker: forms groups, loads weights, allocates the KV pool."""

    def __call__(
        self,
        resolved: ResolvedConfig,
        global_rank: int,
        world: World,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        watch: RankWatch | None = None,
    ) -> Worker:
        """Make the worker of `global_rank`; it tells `watch` where it stands."""
        ...


class Executor(Protocol):
    """All ranks of one engine. After any failure it is closed, and refuses further steps."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def start(self) -> None:
        """Bring all ranks up.

        Raises:
            ConfigError, UnsupportedError, ModelFileError: as a rank raised it; can be mended.
            RankFailed: any other first cause.
        """
        ...

    def submit(self, batches: Mapping[int, Submission]) -> None:
        """Begin one step of each named replica, behind those that it has under way.

        Args:
            batches: by replica; where replicas move in lockstep, all are named.
        Raises:
            RankFailed: the executor is not running.
        """
        ...

    def first_done(self) -> int:
        """Wait until the oldest step of some replica is done; of several the one submitted first.

        Raises:
            RankFailed: a rank of any replica raised, died or missed its deadline.
        """
        ...

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        """Wait for the oldest step of a replica, and end it.

        Returns:
            One reply per rank of the replica, in order of global rank; all agree on epoch, step and
            digest.
        Raises:
            ValueError: the replica has no step under way.
            RankFailed: a rank of any replica raised, died or missed its deadline.
            PlanMismatch: ranks disagree about the step.
        """
        ...

    def check(self) -> None:
        """See, without waiting, that no rank has ended while no step is under way.

        Raises:
            RankFailed: one has.
        """
        ...

    def execute(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        """Run one step of replica 0: `submit`, then `collect`."""
        ...

    def close(self) -> None:
        """End all ranks and free what they held; a second call does nothing."""
        ...

    def __enter__(self) -> Self:
        """Start, and return itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        ...


def load_worker_factory(reference: str) -> WorkerFactory:
    """Import a worker factory by its `module:attribute` name."""
    module, _, attribute = reference.partition(":")
    factory: WorkerFactory = getattr(importlib.import_module(module), attribute)
    return factory


def progress_of(rank: int, on_progress: RankProgress | None) -> Callable[[int, int], None] | None:
    """What a rank of this process reports to: (done, total), with its own number put in front."""
    return None if on_progress is None else partial(on_progress, rank)


def check_agreement(
    batch: GlobalBatch, digest: int, replies: Sequence[RankReply], first_rank: int = 0
) -> None:
    """Raise unless every rank answered this very step with the driver's own digest.

    Args:
        batch: of the step.
        digest: the driver's.
        replies: of one replica, in order of rank.
        first_rank: global rank of the first reply.
    Raises:
        PlanMismatch: names the first rank and word that differ.
    """
    for rank, reply in enumerate(replies, start=first_rank):
        for kind, word, found, expected in (
            ("epoch", "epoch", reply.epoch, batch.epoch),
            ("step", "step", reply.step, batch.step),
            ("plan", "digest", reply.digest, digest),
        ):
            if found != expected:
                raise PlanMismatch(
                    f"rank {rank} answered with {word} {found}, the driver sent {expected} in step "
                    f"{batch.step} of epoch {batch.epoch}; nothing of this step is emitted",
                    kind,
                )
