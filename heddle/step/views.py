"""Which keys each row of a step sees, as half-open ranges of positions and of stored rows.

A row at position p sees one main range that ends at p + 1, and under some rules also the first
tokens. Ranges of positions become ranges of a rank's stored rows by the interval law of `KVLayout`.

Legend: `R` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle.config.visibility import Visibility
from heddle.layout.kv import KVLayout

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Row i meets [first[i], end[i]); empty where first >= end."""

    first: IntArray
    end: IntArray

    def __getitem__(self, rows: slice) -> Ranges:
        return Ranges(self.first[rows], self.end[rows])

    @property
    def is_empty(self) -> bool:
        """No row meets anything."""
        return not bool((self.first < self.end).any())

    def clipped(self, start: int, end: int) -> Ranges:
        """The part within [start, end), counted from `start`."""
        found = self.within(start, end)
        return Ranges(found.first - start, found.end - start)

    def within(self, start: int | IntArray, end: int | IntArray) -> Ranges:
        """The part within [start, end), which may differ from row to row."""
        # `np.clip` asks for the limits of the type each time, which costs more than the work.
        return Ranges(
            np.minimum(np.maximum(self.first, start), end),
            np.minimum(np.maximum(self.end, start), end),
        )

    def local(self, layout: KVLayout, rank: int) -> Ranges:
        """Ranges of positions as ranges of the rows that `rank` stores."""
        return Ranges(layout.local_len(self.first, rank), layout.local_len(self.end, rank))

    def hull(self) -> tuple[int, int]:
        """Smallest [start, end) that holds every range; (0, 0) if all are empty."""
        some = self.first < self.end
        if not some.any():
            return 0, 0
        return int(self.first[some].min()), int(self.end[some].max())


class RangesByRun:
    """Ranges of rows that are asked for run by run; most runs are one row, whose range is the hull.

    Example:
        >>> ranges = Ranges(np.array([3, 0]), np.array([7, 5]))
        >>> start, end, part = RangesByRun(ranges).of(slice(0, 1))
        >>> start, end, part.first.tolist(), part.end.tolist()
        (3, 7, [0], [4])
    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._zeros = np.zeros_like(ranges.first)
        self._lengths = ranges.end - ranges.first

    def of(self, rows: slice) -> tuple[int, int, Ranges]:
        """The hull [start, end) of some rows, and their ranges counted from `start`.

        Where all of them are empty, `start >= end`.
        """
        if rows.stop - rows.start == 1:
            start, end = self._ranges.first[rows.start], self._ranges.end[rows.start]
            return int(start), int(end), Ranges(self._zeros[rows], self._lengths[rows])
        met = self._ranges[rows]
        start, end = met.hull()
        return start, end, met.clipped(start, end)


@dataclass(frozen=True, slots=True)
class LocalRange:
    """Local indices [start, end) of one sequence on this rank, by its block table."""

    block_table: IntArray
    start: int
    end: int
    picked: IntArray | None = None
    """Those that are meant, counted from `start`; None: all."""


def visible_ranges(rule: Visibility, positions: IntArray) -> tuple[Ranges, ...]:
    """The ranges of positions that rows see: the main one, then the first tokens where the rule has
    some.

    Args:
        rule: of the layer.
        positions: `[R]`, of the rows.
    """
    main = Ranges(rule.start(positions), positions + 1)
    if rule.num_first == 0:
        return (main,)
    return main, Ranges(np.zeros_like(positions), rule.first_end(positions))
