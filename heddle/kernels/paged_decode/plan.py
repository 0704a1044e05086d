"""Who meets which stored keys: made once per step, used by every layer.

The keys of a row are cut into pieces of about equal size, whatever the number of threads, so that
threads find work within one long sequence as well as over a batch, and the result does not depend
on how many there are. States of pieces merge in ascending order.

    row 0   [0 ............. 700)     pieces  0: [0, 240)  1: [240, 480)  2: [480, 700)
    row 1   [0 .. 40)                         3: [0, 40)

Legend: `R` rows, `S` sequences, `B` blocks of the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

MAX_PIECE = 256
"""Keys of a piece at most. A partial result weighs as much as one or two keys, so pieces of this
size add a hundredth to what is read.
"""
MIN_PIECE = 64
MIN_PIECES = 8
"""Pieces that a row with enough keys is cut into, for threads to share."""
_ALIGN = 16


class RowWidths(NamedTuple):
    """Where key and value of a kv head lie in the elements of its row."""

    key: int
    """The key is elements [0, key)."""
    value_start: int
    value: int
    """The value is elements [value_start, value_start + value); it may lie within the key."""


@dataclass(frozen=True)
class PagedPlan:
    """Rows, and the stored keys that each of them meets.

    Local index l of sequence s lies in slot
    `block_tables[s, l // block_size] * block_size + l % block_size`.
    """

    block_tables: IntArray
    """`[S, B]`; entries that no row meets may hold anything."""
    table_of_row: IntArray
    """`[R]`: the sequence that a row reads."""
    first: IntArray
    """`[R]`: row i meets local indices [first[i], end[i]); none where they are equal."""
    end: IntArray
    """`[R]`."""
    block_size: int

    @cached_property
    def pieces(self) -> IntArray:
        """`[P, 3]`: row, first and end of each piece; pieces of a row are neighbours, in order."""
        lengths = np.maximum(self.end - self.first, 0)
        most = np.maximum(1, -(-lengths // MIN_PIECE))
        counts = np.maximum(-(-lengths // MAX_PIECE), np.minimum(most, MIN_PIECES))
        counts[lengths == 0] = 0
        rows = np.repeat(np.arange(len(lengths)), counts)
        place = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        size = (-(-lengths // np.maximum(counts, 1)) + _ALIGN - 1) // _ALIGN * _ALIGN
        first = np.minimum(place * size[rows], lengths[rows])
        end = np.minimum(first + size[rows], lengths[rows])
        kept = first < end
        start = self.first[rows]
        pieces: IntArray = np.stack([rows, start + first, start + end], axis=1)[kept]
        return pieces

    @cached_property
    def pieces_until(self) -> IntArray:
        """`[R + 1]`: pieces of row i are [pieces_until[i], pieces_until[i + 1])."""
        counts = np.bincount(self.pieces[:, 0], minlength=len(self.first))
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def num_keys(self) -> int:
        """Keys that all rows meet."""
        return int(np.maximum(self.end - self.first, 0).sum())

    @cached_property
    def _arrays(self) -> tuple[IntArray, ...]:
        """Block tables, tables of rows, pieces and their bounds, as a kernel reads them."""
        arrays = (self.block_tables, self.table_of_row, self.pieces, self.pieces_until)
        return tuple(np.ascontiguousarray(array, dtype=np.int64) for array in arrays)

    def words(self, num_lanes: int, value_width: int) -> int:
        """Address of what a kernel is told of the plan, see `words.py`, for states of a shape; good
        while the plan lives. Launches that may overlap in time need plans of their own.
        """
        shape = (num_lanes, value_width)
        if shape not in self._words:
            self._words[shape] = _PlanWords(self, num_lanes, value_width)
        return self._words[shape].address

    @cached_property
    def _words(self) -> dict[tuple[int, int], _PlanWords]:
        return {}

    def follow(self, other: PagedPlan) -> None:
        """Tell kernels that were launched with this plan of another one, which outlives them."""
        for shape, words in self._words.items():
            other.words(*shape)
            words.values[:] = other._words[shape].values


class _PlanWords:
    """The words of a plan, and the memory that they name."""

    def __init__(self, plan: PagedPlan, num_lanes: int, value_width: int) -> None:
        tables, table_of_row, pieces, until = plan._arrays
        num_states = len(pieces) * num_lanes
        self._partial = np.empty(num_states * (value_width + 1), np.float32)
        self._counter = np.zeros(1, np.int64)
        partial = self._partial.ctypes.data
        self.values = np.array(
            (
                tables.ctypes.data,
                tables.shape[1],
                table_of_row.ctypes.data,
                pieces.ctypes.data,
                until.ctypes.data,
                len(pieces),
                plan.block_size,
                self._counter.ctypes.data,
                partial,
                partial + 4 * num_states * value_width,
            ),
            np.int64,
        )
        self.address = self.values.ctypes.data
