"""A world of one: the worker runs in the caller's thread."""

from __future__ import annotations

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import (
    RANK_WORKER,
    RankProgress,
    Worker,
    load_worker_factory,
    progress_of,
)
from heddle.engine.executors.failure import failure_of
from heddle.engine.executors.lifecycle import ManagedExecutor, RanksFailed
from heddle.errors import ConfigError
from heddle.step.batch import GlobalBatch, RankReply


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
            self._worker = factory(self._resolved, 0, SoloWorld(), report)
        except Exception as error:
            raise RanksFailed([failure_of(0, error)]) from None

    def _run(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        assert self._worker is not None  # set by every successful start
        try:
            return (self._worker.execute(batch, digest, None),)
        except Exception as error:
            raise RanksFailed([failure_of(0, error)]) from None

    def _take_down(self) -> None:
        self._worker = None
        if self._threads_before is not None:
            import torch

            torch.set_num_threads(self._threads_before)  # the thread is the caller's
            self._threads_before = None
