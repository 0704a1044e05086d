"""Rows whose ranges of keys form a pattern that a dense kernel knows.

    constant   [f, e) [f, e)   [f, e)        every row sees the same rectangle
    causal     [f, e) [f, e+1) [f, e+2)      a rectangle [f, e-1) for all rows, then a causal
                                             square: row i of the stretch sees i+1 keys from e-1 on
    band       [f, e) [f+1, e+1) [f+2, e+2)  a sliding window

Self parts of prompts are causal, cached context is constant; a chunk of chunked-local attention is
either, from its own first key on. Anything else (a few rows against a sharded context, a
staircase) is left to a masked path.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from heddle.attention.backends.base import IntArray

MIN_MEAN_ROWS = 32
"""Below this mean length many stretches cost more calls than masking costs scores."""

Pattern = Literal["constant", "causal", "band"]

_STEPS: tuple[tuple[Pattern, int, int], ...] = (
    ("constant", 0, 0),
    ("causal", 0, 1),
    ("band", 1, 1),
)
"""Steps of the first key and of the end from row to row."""


class Stretch(NamedTuple):
    """Rows [start, end) and what they see.

    Of a constant stretch every row sees keys [first_key, end_key); of a causal one this is the
    rectangle before the square; of a band it is the range of the first row.
    """

    start: int
    end: int
    first_key: int
    end_key: int
    pattern: Pattern


def find_stretches(first: IntArray, end: IntArray) -> list[Stretch] | None:
    """Cut rows into stretches; rows that see nothing are in none.

    Args:
        first: `[R]`, first key that each row sees.
        end: `[R]`, one past the last; both 0 for a row that sees nothing.

    Returns:
        Stretches in row order, or None where rows form no long ones.

    Example:
        >>> find_stretches(np.array([0, 0, 0]), np.array([0, 1, 2]))
        [Stretch(start=1, end=3, first_key=0, end_key=0, pattern='causal')]
        >>> find_stretches(np.zeros(6), np.array([3, 4, 4, 5, 5, 6])) is None
        True
    """
    cuts, patterns = _cuts(first, end)
    if len(patterns) > 1 and len(end) < MIN_MEAN_ROWS * len(patterns):
        return None
    found = []
    for (start, stop), pattern in zip(pairwise(cuts), patterns, strict=True):
        first_key, end_key = int(first[start]), int(end[start])
        if pattern != "causal":
            found.append(Stretch(start, stop, first_key, end_key, pattern))
        elif first_key == end_key:  # the first row sees nothing
            found.append(Stretch(start + 1, stop, first_key, end_key, pattern))
        else:
            found.append(Stretch(start, stop, first_key, end_key - 1, pattern))
    return [each for each in found if each.pattern == "causal" or each.first_key < each.end_key]


def _cuts(first: IntArray, end: IntArray) -> tuple[list[int], list[Pattern]]:
    """Borders of the longest stretches, taken greedily, and the pattern between each two."""
    num_rows = len(end)
    if num_rows <= 1:
        return list(range(num_rows + 1)), ["constant"] * num_rows
    first_steps, end_steps = np.diff(first), np.diff(end)
    kinds = np.full(num_rows - 1, -1)
    for kind, (_, first_step, end_step) in enumerate(_STEPS):
        kinds[(first_steps == first_step) & (end_steps == end_step)] = kind
    cuts: list[int] = [0]
    patterns: list[Pattern] = []
    while cuts[-1] < num_rows:
        rest = kinds[cuts[-1] :]
        if len(rest) == 0 or rest[0] < 0:
            cuts.append(cuts[-1] + 1)
            patterns.append("constant")
            continue
        other = np.flatnonzero(rest != rest[0])
        cuts.append(cuts[-1] + 1 + (int(other[0]) if len(other) else len(rest)))
        patterns.append(_STEPS[rest[0]][0])
    return cuts, patterns
