"""What all executors share: new, running, closed, and the one way from a failure to closed.

The kinds differ in how ranks come up, run a step and go away; everything about *when* they may is
here, so that no executor runs a step after a failure or leaves ranks behind an exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, NoReturn, Self

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import check_agreement
from heddle.engine.executors.failure import Failure, start_error, step_error
from heddle.errors import HeddleError, RankFailed
from heddle.step.batch import GlobalBatch, RankReply


class RanksFailed(Exception):
    """What is known of each failed rank, in order of arrival; never leaves an executor."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__(self.failures)


class ManagedExecutor(ABC):
    """An executor but for three duties: `_bring_up`, `_run` and `_take_down`."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        self._resolved = resolved
        self._state: Literal["new", "running", "closed"] = "new"
        self._cause = ""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._resolved.parallel.world_size

    @abstractmethod
    def _bring_up(self) -> None:
        """Start all ranks; `RanksFailed` unless all of them are ready."""

    @abstractmethod
    def _run(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        """Run one step on all ranks; `RanksFailed` unless all of them reply."""

    @abstractmethod
    def _take_down(self) -> None:
        """End whatever has been started; never waits for a hung rank. Called more than once."""

    def start(self) -> None:
        """Bring all ranks up; see `Executor.start`."""
        if self._state != "new":
            raise HeddleError(f"this executor is {self._state}; an executor starts once")
        try:
            self._bring_up()
        except RanksFailed as failed:
            self._end(start_error(self._resolved.parallel, failed.failures))
        except BaseException:
            self.close()
            raise
        self._state = "running"

    def execute(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        """Run one step; see `Executor.execute`."""
        if self._state != "running":
            raise RankFailed(
                f"this executor is {'not started' if self._state == 'new' else 'closed'}, step "
                f"{batch.step} is refused; start a new executor{self._cause}"
            )
        try:
            replies = self._run(batch, digest)
            check_agreement(batch, digest, replies)
        except RanksFailed as failed:
            self._end(step_error(self._resolved.parallel, failed.failures, batch.epoch, batch.step))
        except HeddleError as error:
            self._end(error)
        except BaseException:  # an interrupted step leaves ranks in the middle of it
            self.close()
            raise
        return replies

    def close(self) -> None:
        """End all ranks and free what they held; a second call does nothing."""
        self._state = "closed"
        self._take_down()

    def __enter__(self) -> Self:
        """Start, and return itself."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _end(self, error: HeddleError) -> NoReturn:
        """Close, remember why, and raise."""
        first_line = str(error).partition("\n")[0]
        self._cause = f"; it was closed because {first_line}"
        self.close()
        raise error from error.__cause__
