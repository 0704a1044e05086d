"""KV storage without tensors: a row is a name of all tokens up to it, so wrong content is visible.

A row really depends on every token before it and on nothing else; so here it is a chained hash, and
a block that holds another prompt's rows, or stale ones, never compares equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle.kvcache.copies import BlockCopy

Row = int | str
GARBAGE = "garbage"
ZERO = "zero"


def rows_of(tokens: Sequence[int]) -> list[Row]:
    """The right row of each position."""
    rows: list[Row] = []
    name = 0
    for token in tokens:
        name = hash((name, token))
        rows.append(name)
    return rows


class FakeRows:
    """Rows of each block, one per position that a virtual block covers."""

    def __init__(self, num_blocks: int, unit: int) -> None:
        self.unit = unit
        self.rows: list[list[Row]] = [[GARBAGE] * unit for _ in range(num_blocks)]

    def spoil(self, blocks: Sequence[int]) -> None:
        """What was in newly allocated blocks is not to be relied on."""
        for block in blocks:
            self.rows[block] = [GARBAGE] * self.unit

    def edit(self, copies: Sequence[BlockCopy], wiped: Sequence[int]) -> None:
        """Wipes, then copies, as ranks do before the first write of a step."""
        for block in wiped:
            self.rows[block] = [ZERO] * self.unit
        assert not {c.source_block for c in copies} & {c.target_block for c in copies}
        for copy in copies:
            assert copy.start % self.unit == 0
            assert copy.start < copy.end <= copy.start + self.unit
            count = copy.end - copy.start
            self.rows[copy.target_block][:count] = self.rows[copy.source_block][:count]

    def write(self, table: Sequence[int], tokens: Sequence[int], start: int, end: int) -> set[int]:
        """Compute positions [start, end); returns the blocks that were written."""
        assert self.read(table, start) == rows_of(tokens[:start]), "context rows are not the prefix"
        right = rows_of(tokens[:end])
        for position in range(start, end):
            self.rows[table[position // self.unit]][position % self.unit] = right[position]
        return {table[position // self.unit] for position in range(start, end)}

    def read(self, table: Sequence[int], count: int) -> list[Row]:
        """Rows of the first `count` positions of a sequence."""
        return [self.rows[table[at // self.unit]][at % self.unit] for at in range(count)]
