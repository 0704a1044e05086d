"""The one order of candidates: logit descending, then id ascending; and the draw from it.

Sorting a whole vocabulary for every token is waste: the draw nearly always falls among the first
few dozen candidates. So a prefix of the order is made, and a longer one only when the shorter did
not decide. The result never depends on how far the prefix grew.

A prefix is all values from some threshold on. The k-th largest of the maxima of strips is one: no
larger than the k-th largest value, and mostly little smaller, since the largest values seldom share
a strip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_FIRST_PREFIX = 64
_GROWTH = 8
_STRIP = 64
"""Values of a strip, equally far apart."""

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]


def ordered_prefix(values: Floats, count: int) -> Ids:
    """Ids of the largest values, in (value descending, id ascending) order.

    Args:
        values: `[vocabulary]`, without NaN.
        count: how many are wanted, >= 0.
    Returns:
        An exact prefix of the full order, at least `min(count, vocabulary)` long; longer where
        values tie at its end.
    """
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    ids = np.flatnonzero(values >= _threshold(values, count))
    return ids[np.argsort(-values[ids], kind="stable")]


def _threshold(values: Floats, count: int) -> np.floating[Any]:
    """A number that at least `count` values reach."""
    num_strips = len(values) // _STRIP
    if num_strips >= 2 * count:
        values = values[: num_strips * _STRIP].reshape(_STRIP, num_strips).max(axis=0)
    cut = len(values) - count
    threshold: np.floating[Any] = np.partition(values, cut)[cut]
    return threshold


def draw_token(
    scaled: Floats, *, top_k: int, top_p: float, min_p: float, uniform: float
) -> int | None:
    """Draw one id: min_p, top_k, top_p, then the first id whose cumulative mass exceeds the draw.

    Args:
        scaled: `[vocabulary]` logits after masks and temperature; -inf is excluded, NaN is not
            allowed.
        top_k: keep exactly this many; 0 or less keeps all.
        top_p: keep the smallest prefix that reaches this share of what top_k left; 1 keeps all.
        min_p: keep ids at least this share as likely as the most likely one.
        uniform: in [0, 1).
    Returns:
        An id, or None when every id is excluded.
    Source: docs/sampling.md, "The draw".
    """
    best = scaled.max()
    if not np.isfinite(best):
        return None

    if top_k > 0:
        ids = ordered_prefix(scaled, top_k)[:top_k]
        cumulative = np.cumsum(weigh(scaled[ids], best, min_p))
        return draw_from([Prefix(ids, cumulative, is_open=False)], cumulative[-1], top_p, uniform)
    mass = float(weigh(scaled, best, min_p).sum())
    return draw_from(growing_prefixes(scaled, best, min_p), mass, top_p, uniform)


def weigh(logits: Floats, best: np.floating[Any], min_p: float) -> NDArray[np.float64]:
    """`[n]` logits -> how likely they are relative to the largest, 0 below `min_p`."""
    weights: NDArray[np.float64] = np.exp(logits.astype(np.float64) - np.float64(best))
    weights[weights < min_p] = 0.0
    return weights


class Prefix(NamedTuple):
    """The first candidates, in order."""

    ids: Ids
    cumulative: NDArray[np.float64]
    """Weight of each and those before."""
    is_open: bool
    """More ids are kept than these; their mass counts."""


def draw_from(prefixes: Iterable[Prefix], mass: float, top_p: float, uniform: float) -> int:
    """Draw from the first prefix that is long enough to tell.

    A larger mass never leads to an earlier candidate.

    Args:
        prefixes: longer and longer; the last one is not open.
        mass: weight of all candidates.
        top_p: see `draw_token`.
        uniform: see `draw_token`.
    """
    for prefix in prefixes:
        ids, cumulative, is_open = prefix
        if top_p < 1.0:
            reached = int(np.searchsorted(cumulative, top_p * mass, side="left"))
            if is_open and reached == len(cumulative):
                continue
            cumulative, is_open = cumulative[: reached + 1], False
        target = uniform * (float(cumulative[-1]) if top_p < 1.0 else mass)
        index = int(np.searchsorted(cumulative, target, side="right"))
        if index < len(cumulative):
            return int(ids[index])
        if not is_open:
            # Rounding put the draw at the very end of the mass: the last id that has any.
            return int(ids[np.flatnonzero(np.diff(cumulative, prepend=0.0))[-1]])
    raise AssertionError("the last prefix is the whole vocabulary, and never open")


def growing_prefixes(values: Floats, best: np.floating[Any], min_p: float) -> Iterator[Prefix]:
    """Prefixes of the order of all values, up to the whole of it."""
    count = _FIRST_PREFIX
    while True:
        ids = ordered_prefix(values, count)
        is_open = len(ids) < len(values)
        yield Prefix(ids, np.cumsum(weigh(values[ids], best, min_p)), is_open)
        if not is_open:
            return
        count *= _GROWTH
