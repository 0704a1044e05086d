"""Ranks that a launcher has started, on one host or many: global rank 0 is the driver as well.

    rank 0                             every other rank
    TorchrunExecutor                   serve_rank
      submit: broadcast Round  ------>   queue its step
      (its own worker runs)              (its worker runs)
      collect: broadcast Collect ---->   wait for its reply
      gather replies  <---------------   Reply, or nothing from other replicas
      close: broadcast Stop  -------->   return

All of it travels over the ranks' own world; no further socket is opened. A rank that fails leaves,
which ends the collectives of its peers, and its launcher ends the rest: restarting is the
launcher's business, not ours. Which replica is done first cannot be seen from here without asking,
so replicas are collected in order of submission.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import RANK_WORKER, RankProgress, progress_of
from heddle.engine.executors.deadline import COLLECTIVE_SHARE
from heddle.engine.executors.failure import Failure, failure_of, start_error, step_error
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.ledger import StepUnderWay
from heddle.engine.executors.lifecycle import ManagedExecutor, RanksFailed
from heddle.engine.executors.messages import Collect, Ready, Reply, Round, Step, Stop
from heddle.engine.executors.seat import Seat
from heddle.errors import ConfigError
from heddle.layout.mesh import Mesh
from heddle.step.batch import GlobalBatch, RankReply

_T = TypeVar("_T")
_OWN_REPLICA = 0
"""Of rank 0."""
_GRACE_SECONDS = 1.0
"""A driver that comes late itself still takes in what has arrived."""


class TorchrunExecutor(ManagedExecutor):
    """The driver's executor, in the process of global rank 0; the others run `serve_rank`."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        launch: LaunchInfo,
        *,
        worker: str = RANK_WORKER,
        on_progress: RankProgress | None = None,
    ) -> None:
        """Prepare; the ranks meet in `start`.

        Raises:
            ConfigError: this is not rank 0, or the layout has another number of ranks.
        """
        super().__init__(resolved)
        launch.check_world(self.world_size)
        if launch.rank != 0:
            raise ConfigError(
                f"RANK={launch.rank} cannot be the driver; rank 0 is, and the others serve_rank"
            )
        self._launch = launch
        self._factory = worker
        self._on_progress = on_progress
        self._seat: Seat | None = None

    def _bring_up(self) -> None:
        try:
            report = progress_of(0, self._on_progress)
            seat = self._seat = Seat(self._resolved, self._launch, self._factory, report)
            weakref.finalize(self, seat.leave)  # else the other ranks would wait for days
            seat.gather(Ready(), Ready, self._resolved.startup_timeout_seconds)
        except Exception as error:
            raise RanksFailed([_pointing_elsewhere(failure_of(0, error))]) from None
        seat.is_idle = True

    def _send(self, steps: Mapping[int, StepUnderWay]) -> None:
        seat = self._seated()
        seat.is_idle = False
        shares = {
            replica: Step(step.batch, step.digest, COLLECTIVE_SHARE * step.seconds)
            for replica, step in steps.items()
        }
        limit = max(step.seconds for step in steps.values())
        self._attempt(lambda: seat.send(Round(shares), limit))
        if _OWN_REPLICA in shares:
            seat.begin(shares[_OWN_REPLICA])

    def _await(self, replicas: Collection[int]) -> None:
        seat, replica = self._seated(), self._ledger.oldest(replicas)
        ranks = self._ledger.ranks_of(replica)
        deadline = max(self._ledger.head(replica).deadline, time.monotonic() + _GRACE_SECONDS)

        def gather() -> list[Reply]:
            seat.send(Collect(replica), deadline - time.monotonic())
            own = seat.reply(deadline - time.monotonic()) if replica == _OWN_REPLICA else None
            return seat.gather(own, Reply, deadline - time.monotonic())

        for rank, answer in zip(ranks, self._attempt(gather), strict=True):
            self._ledger.add(rank, answer.reply)

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        """End the oldest step of a replica; see `Executor.collect`."""
        replies = super().collect(replica)
        self._seated().is_idle = self._ledger.is_idle
        return replies

    def _attempt(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:
            raise RanksFailed([_pointing_elsewhere(failure_of(0, error))]) from None

    def _seated(self) -> Seat:
        assert self._seat is not None  # set by every successful start
        return self._seat

    def _take_down(self) -> None:
        if self._seat is not None:
            self._seat.leave()
            self._seat = None


def serve_rank(resolved: ResolvedConfig, launch: LaunchInfo, *, worker: str = RANK_WORKER) -> None:
    """Be a rank other than 0; returns when the driver says so.

    Args:
        resolved: of the same layout as the driver's, which replaces what may differ between hosts.
        launch: of this process.
        worker: factory of the rank's worker.
    Raises:
        ConfigError: the layout has another number of ranks.
        HeddleError: this rank failed; names its coordinates and step. The process should now end
            with a failure, so that its launcher ends the others.
    """
    launch.check_world(resolved.parallel.world_size)
    parallel = resolved.parallel
    try:
        seat = Seat(resolved, launch, worker)
        seat.gather(Ready(), Ready, resolved.startup_timeout_seconds)
    except Exception as error:
        raise start_error(parallel, [failure_of(launch.rank, error)]) from error
    replica = Mesh.of(parallel).replica_of(launch.rank)
    limit = resolved.step_timeout_seconds * parallel.pipeline_parallel_size
    under_way: deque[GlobalBatch] = deque()
    while not isinstance(message := seat.receive(), Stop):
        if isinstance(message, Round):
            if replica in message.steps:
                seat.begin(message.steps[replica])
                under_way.append(message.steps[replica].batch)
            continue
        try:
            own = seat.reply(limit) if message.replica == replica else None
            seat.gather(own, Reply, limit)
        except Exception as error:
            seat.leave()  # the peers' collectives end with it
            failure = failure_of(launch.rank, error)
            batch = under_way[0] if under_way else GlobalBatch(epoch=0, step=0, requests=())
            raise step_error(parallel, [failure], batch.epoch, batch.step) from error
        if own is not None:
            under_way.popleft()
    seat.leave()


def _pointing_elsewhere(failure: Failure) -> Failure:
    """A lost peer cannot tell rank 0 why; say where the cause is to be found."""
    if not failure.is_derived:
        return failure
    hint = "the first cause is in the output of the rank that ended first"
    return dataclasses.replace(failure, text=f"{failure.text}; {hint}")
