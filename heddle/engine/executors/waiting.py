"""Waiting for answers of ranks, and finding the first cause when some do not come.

Answers, failures and the deadline are awaited together. After a failure others may follow that
explain it better: a lost peer is explained by the rank that ended, a timeout by the rank that stays
silent. How long that is worth waiting for, and what a silent rank looks like, depends on where
ranks live.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from heddle.engine.executors.failure import Failure
from heddle.engine.executors.ledger import StepLedger
from heddle.engine.executors.lifecycle import RanksFailed
from heddle.errors import RankFailed
from heddle.step.batch import RankReply

T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
_GRACE_SECONDS = 1.0
"""A driver that comes late itself still takes in what has arrived."""
_LOOK_SECONDS = 0.1
"""Between two looks at whether answers are still wanted."""


class Awaited(Protocol[T_contra]):
    """What is waited for."""

    def is_done(self) -> bool:
        """Nothing more is needed."""
        ...

    def add(self, rank: int, answer: T_contra) -> None:
        """Take in an answer."""
        ...

    def owing(self, failed: Collection[int]) -> set[int]:
        """Ranks whose answer is missing; with failed ranks, those that may explain them."""
        ...


class Source(Protocol[T_co]):
    """Where answers come from."""

    def poll(self, timeout: float) -> Iterable[tuple[int, T_co | Failure]]:
        """What has happened, rank by rank, waiting at most `timeout` seconds for something."""
        ...

    def patience(self, failure: Failure) -> float:
        """How long to wait, after a failure, for one that explains it."""
        ...

    def hung(self, silent: Sequence[int], waited_seconds: float) -> list[Failure]:
        """A failure for each rank that neither answered nor failed."""
        ...


def await_answers(
    source: Source[T], awaited: Awaited[T], deadline: float, limit_seconds: float
) -> None:
    """Wait until `awaited` is done.

    Args:
        source: of answers.
        awaited: takes them in.
        deadline: monotonic time.
        limit_seconds: how long before the deadline the wait began, in the words of an error.
    Raises:
        RanksFailed: a rank failed, or was silent until the deadline.
    """
    failures: dict[int, Failure] = {}
    give_up = max(deadline, time.monotonic() + min(_GRACE_SECONDS, limit_seconds / 2))
    while failures or not awaited.is_done():
        if failures and not awaited.owing(failures) - failures.keys():
            break
        remaining = give_up - time.monotonic()
        if remaining <= 0:
            break
        for rank, answer in source.poll(remaining):
            if rank in failures:
                continue  # a rank that has failed ends too; that is no news
            if not isinstance(answer, Failure):
                awaited.add(rank, answer)
                continue
            failures[rank] = answer
            give_up = min(give_up, time.monotonic() + source.patience(answer))
    else:
        return
    found = list(failures.values())
    if all(failure.is_derived for failure in found):
        silent = sorted(awaited.owing(failures) - failures.keys())
        found += source.hung(silent, limit_seconds + time.monotonic() - deadline)
    raise RanksFailed(found)


class Stoppable(Generic[T]):
    """A source whose answers may stop being wanted while they are waited for.

    Args:
        source: of answers.
        closing: set, by any thread, when they are not wanted any more; None: they always are.
    """

    def __init__(self, source: Source[T], closing: threading.Event | None) -> None:
        self._source = source
        self._closing = closing
        self.patience, self.hung = source.patience, source.hung

    def poll(self, timeout: float) -> Iterable[tuple[int, T | Failure]]:
        """See `Source.poll`; may return early, with nothing.

        Raises:
            RankFailed: answers are not wanted any more.
        """
        if self._closing is None:
            return self._source.poll(timeout)
        if self._closing.is_set():
            raise RankFailed("ranks were still starting, and are not wanted any more")
        return self._source.poll(min(timeout, _LOOK_SECONDS))


class Roll(Generic[T]):
    """One answer of every rank of the world."""

    def __init__(self, world_size: int) -> None:
        self._missing = set(range(world_size))
        self._answers: dict[int, T] = {}

    @property
    def answers(self) -> list[T]:
        """In order of rank."""
        return [self._answers[rank] for rank in sorted(self._answers)]

    def is_done(self) -> bool:
        """All have answered."""
        return not self._missing

    def add(self, rank: int, answer: T) -> None:
        """Note an answer."""
        self._missing.discard(rank)
        self._answers[rank] = answer

    def owing(self, failed: Collection[int]) -> set[int]:  # noqa: ARG002 - all ranks start together
        """Ranks that have not answered."""
        return set(self._missing)


class OldestSteps:
    """The oldest step of one of some replicas, whichever is done first."""

    def __init__(self, ledger: StepLedger, replicas: Collection[int]) -> None:
        self._ledger = ledger
        self._replicas = replicas

    def is_done(self) -> bool:
        """One is done."""
        return self._ledger.first_done(self._replicas) is not None

    def add(self, rank: int, answer: RankReply) -> None:
        """Note a reply, of whichever replica."""
        self._ledger.add(rank, answer)

    def owing(self, failed: Collection[int]) -> set[int]:
        """See `StepLedger.owing`."""
        return self._ledger.owing(self._replicas, failed)
