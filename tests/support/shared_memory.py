"""Parts of the shared-memory communicator in one process: ranks are threads, without locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from heddle.comm.shared_memory.patience import Patience, Until
from heddle.comm.shared_memory.segment import Segment, create_segment
from heddle.errors import HeddleError
from tests.support.processes import LONG_SECONDS

R = TypeVar("R")


class FakeRoll:
    """A roll on which everybody lives until a test says otherwise."""

    def __init__(self) -> None:
        self.failure: HeddleError | None = None
        self.gone: set[int] = set()

    def check(self, what: str) -> None:
        if self.failure is not None:
            raise self.failure

    def check_peers(self, what: str, missing: Iterable[int]) -> None:
        lost = sorted(self.gone & set(missing))
        if lost:
            raise HeddleError(f"{what}: {lost} are gone")

    def fail(self, error: HeddleError) -> HeddleError:
        self.failure = error
        return error


def patience_of(roll: FakeRoll) -> Patience:
    return Patience(roll, is_crowded=True)  # type: ignore[arg-type]


def until(seconds: float = LONG_SECONDS, rank: int = 0) -> Until:
    return Until(rank, time.monotonic() + seconds, f"a limit of {seconds} s")


@contextmanager
def mapped(world_size: int) -> Iterator[Segment]:
    """A segment, mapped once; threads share the mapping."""
    segment = Segment(create_segment(world_size), world_size)
    try:
        yield segment
    finally:
        segment.close()


def in_threads(bodies: Iterable[Callable[[], R]]) -> list[R | BaseException]:
    """What each body returns or raises."""
    bodies = list(bodies)
    results: dict[int, R | BaseException] = {}

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG_SECONDS)
    return [results[index] for index in range(len(bodies))]
