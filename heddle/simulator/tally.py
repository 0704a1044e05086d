"""What a simulation measures: times of requests, gaps between tokens, and how full it was.

Gaps number as many as tokens, so they are counted in bins of a thousandth; everything else is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BIN = math.log(1.001)
PERCENTILES = (50, 90, 99)
MAX_POINTS = 400
"""Of a series."""


class Spread:
    """How values are spread, from counts in bins of 0.1%; zero has a bin of its own.

    Example:
        >>> gaps = Spread()
        >>> gaps.add(0.5, 3)
        >>> gaps.describe()["p99"], gaps.describe()["max"]
        (0.5, 0.5)
    """

    def __init__(self) -> None:
        self._counts: Counter[int | None] = Counter()
        self._sum = 0.0
        self._most = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """So many equal values, at least 0."""
        self._counts[_bin(value)] += count
        self._sum += value * count
        self._most = max(self._most, value)

    def add_all(self, values: NDArray[np.float64], count: int) -> None:
        """Each of these values above 0, so many times."""
        bins, times = np.unique(np.rint(np.log(values) / _BIN).astype(np.int64), return_counts=True)
        for place, number in zip(bins.tolist(), times.tolist(), strict=True):
            self._counts[place] += number * count
        self._sum += float(values.sum()) * count
        self._most = max(self._most, float(values.max()))

    def describe(self) -> dict[str, float] | None:
        """Percentiles, mean and maximum; None of nothing."""
        total = self._counts.total()
        if not total:
            return None
        found: dict[str, float] = {}
        seen, wanted = 0, list(PERCENTILES)
        for place in sorted(self._counts, key=lambda each: -math.inf if each is None else each):
            seen += self._counts[place]
            while wanted and seen * 100 >= total * wanted[0]:
                value = 0.0 if place is None else math.exp(place * _BIN)
                found[f"p{wanted.pop(0)}"] = min(value, self._most)
        return {**found, "mean": self._sum / total, "max": self._most}


def _bin(value: float) -> int | None:
    return round(math.log(value) / _BIN) if value > 0 else None


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles by nearest rank, mean and maximum; None of nothing.

    Example:
        >>> percentiles([3.0, 1.0, 2.0])["p50"]
        2.0
    """
    if not values:
        return None
    order = sorted(values)
    count = len(order)
    found = {f"p{p}": order[max(-(-count * p // 100) - 1, 0)] for p in PERCENTILES}
    return {**found, "mean": math.fsum(order) / count, "max": order[-1]}


class Sample(NamedTuple):
    """All replicas at one time."""

    time: float
    kv_share: float
    running: int
    waiting: int
    num_tokens: int
    """That were given out until then."""


class Series:
    """At most `MAX_POINTS` samples at even times: when they are too many, every second one goes.

    Args:
        interval: seconds between the first samples.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.next_time = 0.0
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """The sample that was due at `next_time`."""
        self.samples.append(sample)
        if len(self.samples) >= MAX_POINTS:
            self.samples = self.samples[::2]
            self.interval *= 2
        self.next_time = self.samples[-1].time + self.interval

    def describe(self) -> dict[str, list[float]]:
        """Columns; the rate at a sample is that since the one before it."""
        rates = [0.0]
        for before, after in zip(self.samples, self.samples[1:], strict=False):
            rates.append((after.num_tokens - before.num_tokens) / (after.time - before.time))
        return {
            "time_s": [sample.time for sample in self.samples],
            "kv_share": [sample.kv_share for sample in self.samples],
            "running": [sample.running for sample in self.samples],
            "waiting": [sample.waiting for sample in self.samples],
            "tok_s": rates[: len(self.samples)],
        }


@dataclass(slots=True, kw_only=True)
class Times:
    """Of one request that was let in; seconds of the simulated clock."""

    arrival: float
    prompt_len: int
    first: float | None = None
    """Of its first token."""
    last: float = 0.0
    """Of its newest token."""
    end: float | None = None
    num_tokens: int = 0
    num_cached: int = 0
    num_preemptions: int = 0


@dataclass(kw_only=True)
class Tally:
    """Everything that is counted."""

    times: dict[int, Times] = field(default_factory=dict)
    """By place in the trace, of those that were let in."""
    too_long: int = 0
    queue_full: int = 0
    clipped: int = 0
    gaps: Spread = field(default_factory=Spread)
    num_steps: int = 0
    num_tokens: int = 0
    num_decode_steps: int = 0
    """With at least one decode row."""
    num_starved_steps: int = 0
    longest_gap: float = 0.0
    preemptions: int = 0
    end: float = 0.0
    """Of the last step."""

    def note_token(self, times: Times, now: float) -> None:
        """A request got a token."""
        if times.first is None:
            times.first = now
        else:
            gap = now - times.last
            self.gaps.add(gap)
            self.longest_gap = max(self.longest_gap, gap)
        times.last = now
        times.num_tokens += 1
        self.num_tokens += 1
