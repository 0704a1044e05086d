"""What all executors share: new, running, closed, and the one way from a failure to closed.

The kinds differ in how ranks come up, are told of steps, answer and go away; everything about
*when* they may is here, so that no executor runs a step after a failure or leaves ranks behind an
exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Literal, NoReturn, Self, TypeVar

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import Submission, check_agreement
from heddle.engine.executors.differences import compare_sketch
from heddle.engine.executors.failure import (
    Failure,
    first_cause,
    idle_error,
    start_error,
    step_error,
)
from heddle.engine.executors.ledger import StepLedger, StepUnderWay
from heddle.engine.lockstep import moves_in_lockstep
from heddle.errors import HeddleError, RankFailed
from heddle.layout.mesh import Mesh
from heddle.step.batch import GlobalBatch, RankReply

_T = TypeVar("_T")


class RanksFailed(Exception):
    """What is known of each failed rank, in order of arrival; never leaves an executor."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__(self.failures)


class ManagedExecutor(ABC):
    """An executor but for four duties: `_bring_up`, `_send`, `_await` and `_take_down`."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        self._resolved = resolved
        self._state: Literal["new", "running", "closed"] = "new"
        self._cause = ""
        mesh = Mesh.of(resolved.parallel)
        self._ledger = StepLedger(
            [mesh.ranks_of_replica(replica) for replica in range(mesh.dp_size)],
            resolved.step_timeout_seconds,
            in_lockstep=moves_in_lockstep(resolved),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._resolved.parallel.world_size

    @abstractmethod
    def _bring_up(self) -> None:
        """Start all ranks; `RanksFailed` unless all of them are ready."""

    @abstractmethod
    def _send(self, steps: Mapping[int, StepUnderWay]) -> None:
        """Hand steps to the ranks of their replicas, and return at once."""

    @abstractmethod
    def _await(self, replicas: Collection[int]) -> None:
        """Put replies into the ledger until the oldest step of one of these replicas is done;
        `RanksFailed` when a rank of any replica fails, or is late.
        """

    def _look(self) -> Sequence[Failure]:
        """Ranks that have ended without work; nothing where none can end by itself."""
        return ()

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

    def submit(self, batches: Mapping[int, Submission]) -> None:
        """Begin a step of each named replica; see `Executor.submit`."""
        if self._state != "running":
            numbers = {batch.step for batch, _ in batches.values()}
            raise RankFailed(
                f"this executor is {'not started' if self._state == 'new' else 'closed'}, step "
                f"{min(numbers)} is refused; start a new executor{self._cause}"
            )
        steps = self._ledger.submit(batches)
        self._guarded(lambda: self._send(steps))

    def first_done(self) -> int:
        """Wait for any step; see `Executor.first_done`."""
        replicas = self._ledger.busy_replicas()
        self._ledger.oldest(replicas)  # refuses to wait for nothing
        self._await_oldest(replicas)
        done = self._ledger.first_done(replicas)
        assert done is not None  # that is what was awaited
        return done

    def check(self) -> None:
        """See that idle ranks are there; see `Executor.check`."""
        if self._state == "running" and self._ledger.is_idle:
            failures = self._look()
            if failures:
                self._end(idle_error(self._resolved.parallel, failures))

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        """End the oldest step of a replica; see `Executor.collect`."""
        self._ledger.oldest([replica])
        self._await_oldest([replica])
        step, replies = self._ledger.take(replica)
        first_rank = self._ledger.ranks_of(replica)[0]
        self._guarded(lambda: check_agreement(step.batch, step.digest, replies, first_rank))
        return replies

    def execute(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        """Run one step of replica 0; see `Executor.execute`."""
        self.submit({0: (batch, digest)})
        return self.collect(0)

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

    def _await_oldest(self, replicas: Collection[int]) -> None:
        if self._ledger.first_done(replicas) is None:
            self._guarded(lambda: self._await(replicas))

    def _guarded(self, call: Callable[[], _T]) -> _T:
        """What a call returns; if it raises, this executor is closed."""
        try:
            return call()
        except RanksFailed as failed:
            self._end(self._step_error(failed.failures))
        except HeddleError as error:
            self._end(error)
        except BaseException:  # an interrupted step leaves ranks in the middle of it
            self.close()
            raise

    def _step_error(self, failures: Sequence[Failure]) -> HeddleError:
        """The error in words of the step that the first cause was in."""
        cause = first_cause(failures).rank
        oldest = self._ledger.head(self._ledger.oldest(self._ledger.busy_replicas()))
        batch = (self._ledger.step_of(cause) or oldest).batch
        return step_error(
            self._resolved.parallel,
            failures,
            batch.epoch,
            batch.step,
            lambda rank, sketch: compare_sketch(self._resolved, batch, rank, sketch),
        )

    def _end(self, error: HeddleError) -> NoReturn:
        """Close, remember why, and raise."""
        first_line = str(error).partition("\n")[0]
        self._cause = f"; it was closed because {first_line}"
        self.close()
        raise error from error.__cause__
