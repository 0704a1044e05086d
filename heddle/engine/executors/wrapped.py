"""An executor around another one, for those who want to see what a driver asks of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from heddle.engine.executors.base import Executor, Submission
from heddle.step.batch import GlobalBatch, RankReply


class WrappedExecutor:
    """Passes every call on. Subclasses look at some of them; `execute` goes through theirs."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.inner.world_size

    def start(self) -> None:
        """See `Executor.start`."""
        self.inner.start()

    def submit(self, batches: Mapping[int, Submission]) -> None:
        """See `Executor.submit`."""
        self.inner.submit(batches)

    def first_done(self) -> int:
        """See `Executor.first_done`."""
        return self.inner.first_done()

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        """See `Executor.collect`."""
        return self.inner.collect(replica)

    def check(self) -> None:
        """See `Executor.check`."""
        self.inner.check()

    def execute(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        """`submit`, then `collect`, of replica 0."""
        self.submit({0: (batch, digest)})
        return self.collect(0)

    def close(self) -> None:
        """See `Executor.close`."""
        self.inner.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
