"""Times that can be compared: every contestant is run in turn, forwards, then backwards.

    A B C   C B A   A B C   ...        a drift of the machine meets all of them alike

Absolute times move with the machine and with its other guests; a ratio of medians of one such run
moves little. So nothing here compares with a time of another run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def interleaved(calls: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Call each in turn, in alternating order.

    Args:
        calls: by name.
        rounds: times that each is called, at least 1.
    Returns:
        What each call returned, in order.
    Example:
        >>> order = []
        >>> _ = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
        >>> order
        ['a', 'b', 'b', 'a']
    """
    found: dict[K, list[T]] = {name: [] for name in calls}
    names = list(calls)
    for place in range(rounds):
        for name in names if place % 2 == 0 else reversed(names):
            found[name].append(calls[name]())
    return found


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """The same call, returning the seconds it took."""

    def run() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return run


def interleaved_seconds(
    calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each call, once all are warm.

    Args:
        calls: by name.
        rounds: times that each is timed.
    """
    for call in calls.values():
        call()
    return interleaved({name: timed(call) for name, call in calls.items()}, rounds)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and minimum; of several on a shared machine the minimum is the quietest.

    Example:
        >>> summary([3.0, 1.0, 2.0])
        {'median_seconds': 2.0, 'min_seconds': 1.0}
    """
    return {"median_seconds": median(seconds), "min_seconds": min(seconds)}
