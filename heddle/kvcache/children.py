"""Token runs that may follow one chain key, in an order that makes the longest shared prefix cheap.

In lexicographic order the entry that shares the longest prefix with a query stands directly before
or directly after the query's own place, so two comparisons decide, however many children there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort

Tokens = tuple[int, ...]


def common_prefix_len(left: Tokens, right: Tokens) -> int:
    """Leading tokens in which both agree.

    Example:
        >>> common_prefix_len((1, 2, 3), (1, 2, 9, 9))
        2
    """
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next(at for at in range(limit) if left[at] != right[at])


class Children:
    """For each parent key, a sorted list of (tokens, block)."""

    def __init__(self) -> None:
        self._by_parent: dict[bytes, list[tuple[Tokens, int]]] = {}

    def __contains__(self, parent: bytes) -> bool:
        return parent in self._by_parent

    def add(self, parent: bytes, tokens: Tokens, block: int) -> None:
        """Enter a child; equal tokens may stand there already."""
        insort(self._by_parent.setdefault(parent, []), (tokens, block))

    def remove(self, parent: bytes, tokens: Tokens, block: int) -> None:
        """Take out an entry that was added."""
        entries = self._by_parent[parent]
        del entries[bisect_left(entries, (tokens, block))]
        if not entries:
            del self._by_parent[parent]

    def covering(self, parent: bytes, tokens: Tokens) -> int | None:
        """Block of a child that begins with `tokens` (an exact match first), or None."""
        entries = self._by_parent.get(parent, [])
        at = bisect_left(entries, (tokens,))
        if at < len(entries) and entries[at][0][: len(tokens)] == tokens:
            return entries[at][1]
        return None

    def longest(self, parent: bytes, tokens: Tokens) -> tuple[int, int]:
        """(block, shared) of the child with the longest prefix of `tokens`; (0, 0) if none."""
        entries = self._by_parent.get(parent, [])
        at = bisect_left(entries, (tokens,))
        best = (0, 0)
        for child, block in reversed(entries[max(at - 1, 0) : at + 1]):
            shared = common_prefix_len(child, tokens)
            if shared > best[1]:
                best = (block, shared)
        return best
