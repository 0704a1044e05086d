"""A world of one: the worker runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import (
    RANK_WORKER,
    RankProgress,
    Worker,
    load_worker_factory,
    progress_of,
)
from heddle.engine.executors.failure import failure_of
from heddle.engine.executors.ledger import StepUnderWay
from heddle.engine.executors.lifecycle import ManagedExecutor, RanksFailed
from heddle.errors import ConfigError
from heddle.faults.watch import create_watch


class InlineExecutor(ManagedExecutor):
    """One rank; no thread, no process, no group, and so no deadline."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        worker: str = RANK_WORKER,
        on_progress: RankProgress | None = None,
    ) -> None:
        """Prepare; nothing is loaded before `start`.

        Raises:
            ConfigError: the layout has more than one rank.
        """
        super().__init__(resolved)
        if self.world_size != 1:
            raise ConfigError(
                f"executor=inline with {self.world_size} ranks; inline runs exactly one rank; "
                "legal here: threads, processes"
            )
        self._factory = worker
        self._on_progress = on_progress
        self._worker: Worker | None = None
        self._threads_before: int | None = None

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The worker, while it runs."""
        return () if self._worker is None else (self._worker,)

    def _bring_up(self) -> None:
        import torch  # not above: a driver of processes imports this room and never needs torch

        from heddle.comm.solo import SoloWorld

        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._resolved.num_threads)
        try:
            factory = load_worker_factory(self._factory)
            report = progress_of(0, self._on_progress)
            watch = create_watch(self._resolved.faults, 0, self._resolved.epoch)
            self._worker = factory(self._resolved, 0, SoloWorld(), report, watch=watch)
        except Exception as error:
            raise RanksFailed([failure_of(0, error)]) from None

    def _send(self, steps: Mapping[int, StepUnderWay]) -> None:
        """Nobody else could begin with it."""

    def _await(self, replicas: Collection[int]) -> None:
        assert self._worker is not None  # set by every successful start
        step = self._ledger.head(self._ledger.oldest(replicas))
        try:
            self._ledger.add(0, self._worker.execute(step.batch, step.digest, None))
        except Exception as error:
            raise RanksFailed([failure_of(0, error)]) from None

    def _take_down(self) -> None:
        self._worker = None
        if self._threads_before is not None:
            import torch

            torch.set_num_threads(self._threads_before)  # the thread is the caller's
            self._threads_before = None
