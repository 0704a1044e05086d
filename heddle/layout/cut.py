"""The one way in which a count of units is cut over ranks or stages.

Query heads, layers, experts and rows of weights all follow it, so that whoever asks gets the same
range:

    7 units, 3 parts    [0 1] [2 3] [4 5 6]
"""

from __future__ import annotations


def cut(count: int, size: int, index: int) -> tuple[int, int]:
    """Part `index` of `count` units in `size` parts: `[floor(c * i / s), floor(c * (i+1) / s))`.

    Any count is legal; parts tile the units and differ by at most one, and a cut in `k * s` parts
    refines the cut in `s`.

    Args:
        count: units, at least 0.
        size: parts, at least 1.
        index: of the part, in [0, size).

    Example:
        >>> [cut(10, 4, index) for index in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return count * index // size, count * (index + 1) // size
