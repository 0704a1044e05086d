"""Rows whose visible lengths form a pattern that a dense kernel knows.

    constant   v v v v          every row sees the rectangle [0, v)
    rising     v v+1 v+2 v+3    a rectangle [0, v-1) for all rows, then a causal square: row i of
                                the stretch sees i+1 keys from v-1 on

Self parts of prompts are rising, cached context is constant. Anything else (a few rows against a
sharded context, a staircase) is left to a masked path.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MIN_MEAN_ROWS = 32
"""Below this mean length many stretches cost more calls than masking costs scores."""


class Stretch(NamedTuple):
    """Rows [start, end): all see keys [0, rectangle); if `is_causal`, then also a causal square."""

    start: int
    end: int
    rectangle: int
    is_causal: bool


def find_stretches(visible: npt.NDArray[np.int64]) -> list[Stretch] | None:
    """Cut rows into stretches; rows that see nothing are in none.

    Args:
        visible: `[R]`, keys that each row sees.

    Returns:
        Stretches in row order, or None where rows form no long ones.

    Example:
        >>> find_stretches(np.array([0, 1, 2, 3]))
        [Stretch(start=1, end=4, rectangle=0, is_causal=True)]
        >>> find_stretches(np.array([3, 4, 4, 5, 5, 6])) is None
        True
    """
    num_rows = len(visible)
    cuts = _cuts(visible)
    if len(cuts) > 2 and num_rows < MIN_MEAN_ROWS * (len(cuts) - 1):
        return None
    found = []
    for start, end in pairwise(cuts):
        first, last = int(visible[start]), int(visible[end - 1])
        if first == last:
            found.append(Stretch(start, end, first, is_causal=False))
        elif first == 0:
            found.append(Stretch(start + 1, end, 0, is_causal=True))
        else:
            found.append(Stretch(start, end, first - 1, is_causal=True))
    return [stretch for stretch in found if stretch.is_causal or stretch.rectangle > 0]


def _cuts(visible: npt.NDArray[np.int64]) -> list[int]:
    """Borders of the longest stretches, taken greedily: steps of 0 or of 1 throughout."""
    if len(visible) <= 1:
        return list(range(len(visible) + 1))
    steps = np.diff(visible)
    cuts = [0]
    while cuts[-1] < len(visible):
        start = cuts[-1]
        rest = steps[start:]
        if len(rest) == 0 or rest[0] not in (0, 1):
            cuts.append(start + 1)
            continue
        other = np.flatnonzero(rest != rest[0])
        cuts.append(start + 1 + (int(other[0]) if len(other) else len(rest)))
    return cuts
