"""Costs as theory writes them: a sum of terms, each with a constant that the machine sets.

    seconds = c_1 x_1 + c_2 x_2 + ...        c_i >= 0

Constants minimise relative errors, so that a short step counts as much as a long one. No part of a
step takes less than no time; a term that would is left out, and the others are fitted without it.

Legend: `n` measured steps, `k` terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Law:
    """A sum of terms with its constants."""

    constants: tuple[float, ...]
    """`k` seconds for each unit of a term, none below 0."""
    worst_deviation: float
    """Largest |fitted / measured - 1| over the steps that it was fitted to."""

    def seconds(self, terms: npt.ArrayLike) -> FloatArray:
        """What steps cost by this law.

        Args:
            terms: `[..., k]`.
        """
        found: FloatArray = np.asarray(terms, dtype=float) @ np.array(self.constants)
        return found


def fit_law(terms: npt.ArrayLike, seconds: npt.ArrayLike) -> Law:
    """The law that comes nearest to what was measured.

    Every choice of terms is tried, and the best one without a negative constant is taken: with few
    terms that is non-negative least squares, exactly.

    Args:
        terms: `[n, k]`, n >= k.
        seconds: `[n]`, each above 0.
    Example:
        >>> law = fit_law([[1, 1], [1, 2], [1, 4]], [3, 4, 6])
        >>> [round(constant, 9) for constant in law.constants]
        [2.0, 1.0]
    """
    measured = np.asarray(seconds, dtype=float)
    relative = np.asarray(terms, dtype=float) / measured[:, None]  # each fitted to 1
    ones, num_terms = np.ones(len(measured)), relative.shape[1]
    best, least = np.zeros(num_terms), np.inf
    for size in range(1, num_terms + 1):
        for chosen in map(list, combinations(range(num_terms), size)):
            found = np.zeros(num_terms)
            found[chosen] = np.linalg.lstsq(relative[:, chosen], ones, rcond=None)[0]
            error = float(np.square(relative @ found - 1).sum())
            if found.min() >= 0 and error < least:
                best, least = found, error
    worst = float(np.abs(relative @ best - 1).max())
    return Law(tuple(map(float, best)), worst)


def power(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of the line through the logarithms: which power a cost looks like in this range.

    Example:
        >>> round(power([1, 2, 4], [3, 12, 48]), 6)
        2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
