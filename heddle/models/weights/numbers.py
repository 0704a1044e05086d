"""Small numbers as quantised files store them, read as matrices `[out, in]` by slice.

Plain numbers lie one by one. Packed ones are fields of 32-bit words, several side by side along one
dimension; a slice is widened to whole words and trimmed. A grid spreads one number over a block of
the matrix: a scale, or a zero point.

Legend: `n` outputs and `m` inputs of the matrix, `f` fields of a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.errors import ModelFileError
from heddle.models.weights.source import Span, StoredSource

WORD_BITS = 32


class Numbers(Protocol):
    """A matrix of numbers."""

    def read(self, rows: Span, cols: Span) -> torch.Tensor:
        """`[rows, cols]`, any dtype; only what is needed is read."""
        ...


@dataclass(frozen=True, slots=True)
class PlainNumbers:
    """One stored number each. A vector `[n]` counts as `[n, 1]`, a scalar as `[1, 1]`."""

    source: StoredSource
    name: str
    transposed: bool = False
    """Stored `[in, out]`."""

    def read(self, rows: Span, cols: Span) -> torch.Tensor:
        """`[rows, cols]` as float32."""
        if self.transposed:
            return self.source.read_stored(self.name, cols, rows).t().to(torch.float32)
        spans = (rows, cols)[: len(self.source.shape(self.name))]
        part = self.source.read_stored(self.name, *spans)
        return part.to(torch.float32).view(rows[1] - rows[0], cols[1] - cols[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedNumbers:
    """Fields of 32-bit words, the first of them in the lowest bits unless `order` says otherwise.

    Words are stored `[n, m / f]` (`dim` 1) or `[n / f, m]` (`dim` 0); with `transposed`, the other
    way round: `[m, n / f]` or `[m / f, n]`.
    """

    source: StoredSource
    name: str
    bits: int
    dim: int
    """Stored dimension along which fields of a word lie."""
    transposed: bool = False
    order: tuple[int, ...] = ()
    """Place in the word of each of `f` numbers that follow one another; empty: as they follow."""
    added_to_words: int = 0
    """Added to each word as a whole, carries included."""
    subtracted: int = 0
    """From each field."""

    def read(self, rows: Span, cols: Span) -> torch.Tensor:
        """`[rows, cols]` int32."""
        spans = [cols, rows] if self.transposed else [rows, cols]
        per_word = WORD_BITS // self.bits
        start, end = spans[self.dim]
        spans[self.dim] = (start // per_word, -(-end // per_word))
        words = self.source.read_stored(self.name, *spans)
        if self.added_to_words:
            words = words + self.added_to_words
        places = self.order or tuple(range(per_word))
        shifts = torch.tensor([place * self.bits for place in places], dtype=torch.int32)
        shifts = shifts if self.dim == 1 else shifts[:, None]
        fields = (words.unsqueeze(self.dim + 1) >> shifts) & ((1 << self.bits) - 1)
        fields = fields.flatten(self.dim, self.dim + 1)
        fields = fields.narrow(self.dim, start % per_word, end - start)
        if self.subtracted:
            fields = fields - self.subtracted
        return fields.t() if self.transposed else fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A matrix `[n, m]` made of blocks with one number each."""

    numbers: Numbers
    block: tuple[int, int]
    """Rows and columns of a block."""
    num_groups: int
    """Blocks side by side."""
    source: StoredSource
    group_index: str | None = None
    """Name of `[m]` integers: the block of each column, where columns are not in order."""

    def at(self, rows: Span, cols: Span) -> torch.Tensor:
        """`[rows, cols]`, or `[rows, 1]` or `[1, cols]` where that says the same."""
        row_ids = torch.arange(*rows) // self.block[0]
        groups = self._groups(cols)
        top, bottom = int(row_ids[0]), int(row_ids[-1]) + 1
        left, right = int(groups.min()), int(groups.max()) + 1
        part = self.numbers.read((top, bottom), (left, right)).to(torch.float32)
        if right - left > 1:
            part = part.index_select(1, groups - left)
        return part.index_select(0, row_ids - top) if bottom - top > 1 else part

    def _groups(self, cols: Span) -> torch.Tensor:
        if self.group_index is None:
            return torch.arange(*cols) // self.block[1]
        groups = self.source.read_stored(self.group_index, cols).to(torch.int64)
        if int(groups.min()) < 0 or int(groups.max()) >= self.num_groups:
            raise ModelFileError(
                f"{self.source.location(self.group_index)}: {self.group_index} holds a group "
                f"outside [0, {self.num_groups})"
            )
        return groups


def num_words(count: int, bits: int) -> int:
    """Words for `count` numbers."""
    return -(-count * bits // WORD_BITS)
