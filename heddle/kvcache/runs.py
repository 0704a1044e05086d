"""Free block ids as maximal runs, so that a block table is mostly a few contiguous pieces.

    free  {2 3 4 | 7 | 9 10 11 12}    starts 2 7 9, ends 5 8 13

A table that is one run can be read as one slice; so a growing table continues where it ends if it
can, and otherwise takes from the largest run, which leaves room to grow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class FreeRuns:
    """A set of block ids, kept as sorted, disjoint, non-touching runs [start, end)."""

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start] if start < end else []
        self._ends = [end] if start < end else []
        self._size = max(end - start, 0)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        at = bisect_right(self._starts, block) - 1
        return at >= 0 and block < self._ends[at]

    def runs(self) -> Iterator[tuple[int, int]]:
        """The runs [start, end), ascending."""
        return zip(self._starts, self._ends, strict=True)

    def add(self, block: int) -> None:
        """Put one id back; it must not be in the set."""
        at = bisect_left(self._starts, block)
        joins_left = at > 0 and self._ends[at - 1] == block
        joins_right = at < len(self._starts) and self._starts[at] == block + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._ends[at - 1] = block + 1
        elif joins_right:
            self._starts[at] = block
        else:
            self._starts.insert(at, block)
            self._ends.insert(at, block + 1)
        self._size += 1

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove and return `count` ids in as few ascending runs as this greedy choice finds.

        Args:
            count: ids wanted; at most `len(self)`.
            after: last id of the table that grows; its successor is taken first if it is free.
        Example:
            >>> free = FreeRuns(1, 9)
            >>> free.take(2), free.take(1), free.take(2, after=3)
            ([1, 2], [3], [4, 5])
        """
        taken: list[int] = []
        if after is not None and count:
            at = bisect_left(self._starts, after + 1)
            if at < len(self._starts) and self._starts[at] == after + 1:
                taken += self._take_front(at, count)
        while len(taken) < count:
            taken += self._take_front(self._largest(), count - len(taken))
        return taken

    def _largest(self) -> int:
        """Index of the longest run, the lowest of equals."""
        return max(
            range(len(self._starts)), key=lambda at: (self._ends[at] - self._starts[at], -at)
        )

    def _take_front(self, at: int, count: int) -> list[int]:
        """Up to `count` ids from the front of one run."""
        start, end = self._starts[at], min(self._ends[at], self._starts[at] + count)
        if end == self._ends[at]:
            self._starts.pop(at)
            self._ends.pop(at)
        else:
            self._starts[at] = end
        self._size -= end - start
        return list(range(start, end))
