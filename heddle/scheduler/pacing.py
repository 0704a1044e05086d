"""How many prompt rows a step may have beside decodes, so that these keep their pace.

    seconds of a step  ~  fixed + per_work * work
    work of a row that reads k keys  =  1 + k / attention_length

`fixed` is learned from steps without prompt rows, `per_work` from the others; both are moving
averages that take a `GAIN` of each new sample. The budget is what fits into the rest of the time:

    most rows whose work is at most (AIM * target - fixed) / per_work, in whole `MIN_PROMPT_ROWS`

Why it does not swing. Let a step cost f + c w, f below the aim a, and let `fixed` be f', which
counts for at most a / 2 here. The next sample of `per_work` p is (f - f') / w + c with
w = (a - f') / p, so

    p  <-  (1 - GAIN (1 - (f - f') / (a - f'))) p  +  GAIN c

The factor lies in [1 - 2 GAIN, 1): p goes to its end from one side, wherever it starts, and there
f' + p w = f + c w = a, even where f' is not f. In noise of +-e of a sample, p stays within +-e of
that. A sample beyond `MAX_JUMP` times the average counts as that much: a pause is not a trend.

All that enters is an argument, so the same past gives the same budget.
Source: our derivation; the shape is that of an integral controller on the logarithm of the budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

from heddle.scheduler.batch import ScheduledBatch

MIN_PROMPT_ROWS = 16
"""Prompt rows that a step may always have, and the unit of budgets: steps of few sizes look alike,
and steps that look alike are cheaper."""

AIM = 0.8
"""Share of the target that a step is meant to take. The rest is for noise, and for the first steps
beside decodes, whose fixed part is not known yet.
"""

GAIN = 0.25
"""Share of a new sample in an average; at most 0.5, or budgets would swing."""

MAX_JUMP = 4.0
"""Largest ratio between a sample and the average that it enters."""


class StepLoad(NamedTuple):
    """What a step had to do."""

    num_rows: int
    num_prompt_rows: int
    work: float
    """Of the prompt rows, in rows that read nothing."""

    @classmethod
    def of(cls, batch: ScheduledBatch, attention_length: float) -> StepLoad:
        """The load of a step.

        Args:
            batch: as scheduled; a part that samples after one known row is a decode.
            attention_length: keys that cost as much as the rest of a row.
        """
        pieces = [
            (part.num_computed_tokens, part.num_known_tokens)
            for part in batch.parts
            if part.num_known_tokens > 1 or not part.samples
        ]
        num_prompt_rows = sum(count for _, count in pieces)
        return cls(batch.num_rows, num_prompt_rows, work_of_pieces(pieces, attention_length))


class Pacer:
    """Learns what rows cost, and says how many of prompts go beside decodes.

    Args:
        target_seconds: longest step beside decodes; None: no limit.
        max_rows: rows of a step.
        attention_length: keys that cost as much as the rest of a row.

    Example:
        >>> pacer = Pacer(target_seconds=0.1, max_rows=512, attention_length=1e9)
        >>> pacer.budget(float)  # nothing is known yet
        16
        >>> pacer.observe(StepLoad(num_rows=100, num_prompt_rows=100, work=100.0), seconds=0.1)
        >>> pacer.budget(float), pacer.budget(lambda rows: 2.0 * rows)
        (80, 32)
    """

    def __init__(
        self, *, target_seconds: float | None, max_rows: int, attention_length: float
    ) -> None:
        self.attention_length = attention_length
        self._aim = None if target_seconds is None else AIM * target_seconds
        self._max_rows = max_rows
        self._fixed: float | None = None
        self._per_work: float | None = None
        self._rows, self._seconds = 0.0, 0.0  # of steps with prompt rows, old ones fading

    @property
    def rows_per_second(self) -> float | None:
        """Prompt rows that were computed lately; None if there were none."""
        return self._rows / self._seconds if self._seconds else None

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step has ended.

        Args:
            load: what it had to do; nothing is learned from a step without rows.
            seconds: from its choice to its end.
        """
        if not load.num_rows or seconds <= 0:
            return
        if not load.num_prompt_rows:
            self._fixed = _mixed(self._fixed, seconds)
            return
        fading = 1 - GAIN
        self._rows = fading * self._rows + load.num_prompt_rows
        self._seconds = fading * self._seconds + seconds
        # However wrong `fixed` is for this step, its prompt rows cost something.
        rest = max(seconds - self._fixed_part(), seconds / 10)
        self._per_work = _mixed(self._per_work, rest / load.work)

    def budget(self, work_of: Callable[[int], float]) -> int:
        """Prompt rows of the next step, while decodes run.

        Args:
            work_of: what so many prompt rows would have to do, in rows that read nothing; more
                rows do more.
        Returns:
            In [`MIN_PROMPT_ROWS`, `max_rows`]; `max_rows` if that is less, or without a target.
        """
        if self._aim is None:
            return self._max_rows
        least = min(MIN_PROMPT_ROWS, self._max_rows)
        if self._per_work is None:
            return least
        work = (self._aim - self._fixed_part()) / self._per_work
        legal = range(least, self._max_rows + MIN_PROMPT_ROWS, MIN_PROMPT_ROWS)
        num_legal = bisect_right(legal, work, key=lambda rows: work_of(min(rows, self._max_rows)))
        return min(legal[max(num_legal - 1, 0)], self._max_rows)

    def _fixed_part(self) -> float:
        if self._fixed is None or self._aim is None:
            return 0.0
        return min(self._fixed, self._aim / 2)


def row_weight(num_keys: float, attention_length: float) -> float:
    """What a row costs that reads `num_keys` keys, in rows that read none.

    Example:
        >>> row_weight(4096, attention_length=2048)
        3.0
    """
    return 1 + num_keys / attention_length


def work_of_pieces(pieces: Iterable[tuple[int, int]], attention_length: float) -> float:
    """What pieces of prompts have to do, in rows that read nothing.

    Args:
        pieces: (stored tokens before it, rows) of each; a row reads those before it, too.
        attention_length: keys that cost as much as the rest of a row.
    Example:
        >>> work_of_pieces([(0, 2), (95, 10)], attention_length=100)
        22.02
    """
    return sum(count * row_weight(start + count / 2, attention_length) for start, count in pieces)


def attention_length(hidden_size: int) -> int:
    """Keys that cost a row as much as its products with weights.

    A usual layer of hidden size `E` multiplies a row by 12 E^2 weights (4 E^2 of attention, 8 E^2
    behind it), 24 E^2 operations; a key takes 4 E (two products of E). They meet at 6 E keys.

    Args:
        hidden_size: `E`.
    Source: counting. Only how costs grow along a prompt hangs on it; their size is measured.
    """
    return 6 * hidden_size


def _mixed(average: float | None, sample: float) -> float:
    if average is None:
        return sample
    bounded = min(max(sample, average / MAX_JUMP), average * MAX_JUMP)
    return (1 - GAIN) * average + GAIN * bounded
