"""How long a step may take before its ranks count as hung.

Assume that a step costs `a + b * rows + c * pairs` seconds with unknown coefficients >= 0, where
`pairs` counts (row, visible key) pairs. Then for any step i seen before

    cost(x) <= seconds_i * max(1, rows / rows_i, pairs / pairs_i)

and the least of these bounds over the recent steps is a fit that never falls below the true cost,
however different the new step is from those seen: a long prefill after a thousand decode steps is
not taken for a hang. Noise is covered by the factor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from heddle.step.batch import GlobalBatch

FLOOR_SECONDS = 10.0
"""A step is never called hung earlier than this, unless the limit is lower."""
FACTOR = 8.0
"""A step may take this many times its fit: a busy neighbour is no hang."""
COLLECTIVE_SHARE = 0.8
"""Collectives end at this share of the deadline, so that the innermost limit reports first."""
_WINDOW = 32


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step's cost depends on; global counts, both >= 1."""

    rows: int
    pairs: int

    @classmethod
    def of(cls, batch: GlobalBatch) -> StepWork:
        """Count a batch.

        Example:
            >>> StepWork.of(GlobalBatch(epoch=0, step=0, requests=()))
            StepWork(rows=1, pairs=1)
        """
        rows = pairs = 0
        for request in batch.requests:
            num_rows = len(request.token_ids)
            rows += num_rows
            pairs += num_rows * (request.num_computed_tokens + num_rows)
        return cls(max(rows, 1), max(pairs, 1))


class StepDeadline:
    """The running fit, and the limit that follows from it."""

    def __init__(self, limit_seconds: float) -> None:
        """Start without a fit.

        Args:
            limit_seconds: upper bound of every deadline; also the deadline while nothing was seen.
        """
        self._limit = limit_seconds
        self._seen: deque[tuple[StepWork, float]] = deque(maxlen=_WINDOW)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Note what a finished step took."""
        self._seen.append((work, seconds))

    def seconds(self, work: StepWork) -> float:
        """Longest time the step may take."""
        if not self._seen:
            return self._limit
        fit = min(
            seconds * max(1.0, work.rows / seen.rows, work.pairs / seen.pairs)
            for seen, seconds in self._seen
        )
        return min(self._limit, max(FLOOR_SECONDS, FACTOR * fit))
