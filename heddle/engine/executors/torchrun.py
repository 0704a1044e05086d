"""Ranks that a launcher has started, on one host or many: global rank 0 is the driver as well.

    rank 0                         every other rank
    TorchrunExecutor.execute       serve_rank
      broadcast Step  ----------->   receive
      run its own part               run its part
      gather replies  <-----------   Reply
      broadcast Stop  ----------->   return

All of it travels over the ranks' own world; no further socket is opened. A rank that fails leaves,
which ends the collectives of its peers, and its launcher ends the rest: restarting is the
launcher's business, not ours.
"""

from __future__ import annotations

import dataclasses
import time
import weakref

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import RANK_WORKER, RankProgress, progress_of
from heddle.engine.executors.deadline import COLLECTIVE_SHARE, StepDeadline, StepWork
from heddle.engine.executors.failure import Failure, failure_of, start_error, step_error
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.lifecycle import ManagedExecutor, RanksFailed
from heddle.engine.executors.messages import Ready, Step
from heddle.engine.executors.seat import Seat
from heddle.errors import ConfigError
from heddle.step.batch import GlobalBatch, RankReply


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
        self._deadline = StepDeadline(resolved.step_timeout_seconds)
        self._seat: Seat | None = None

    def _bring_up(self) -> None:
        try:
            report = progress_of(0, self._on_progress)
            seat = self._seat = Seat(self._resolved, self._launch, self._factory, report)
            weakref.finalize(self, seat.leave)  # else the other ranks would wait for days
            seat.gather(Ready(), self._resolved.startup_timeout_seconds)
        except Exception as error:
            raise RanksFailed([_pointing_elsewhere(failure_of(0, error))]) from None
        seat.is_idle = True

    def _run(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        seat = self._seat
        assert seat is not None  # set by every successful start
        work = StepWork.of(batch)
        limit = self._deadline.seconds(work)
        started = time.monotonic()
        step = Step(batch, digest, COLLECTIVE_SHARE * limit)
        seat.is_idle = False
        try:
            seat.send(step, limit)
            answers = seat.gather(seat.run(step), started + limit - time.monotonic())
        except Exception as error:
            raise RanksFailed([_pointing_elsewhere(failure_of(0, error))]) from None
        seat.is_idle = True
        self._deadline.observe(work, time.monotonic() - started)
        return tuple(answer.reply for answer in answers)

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
        seat.gather(Ready(), resolved.startup_timeout_seconds)
    except Exception as error:
        raise start_error(parallel, [failure_of(launch.rank, error)]) from error
    while isinstance(message := seat.receive(), Step):
        batch = message.batch
        try:
            seat.gather(seat.run(message), resolved.step_timeout_seconds)
        except Exception as error:
            seat.leave()  # the peers' collectives end with it
            failure = failure_of(launch.rank, error)
            raise step_error(parallel, [failure], batch.epoch, batch.step) from error
    seat.leave()


def _pointing_elsewhere(failure: Failure) -> Failure:
    """A lost peer cannot tell rank 0 why; say where the cause is to be found."""
    if not failure.is_derived:
        return failure
    hint = "the first cause is in the output of the rank that ended first"
    return dataclasses.replace(failure, text=f"{failure.text}; {hint}")
