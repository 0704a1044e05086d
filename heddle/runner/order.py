"""The one order of candidates: logit descending, then id ascending; and the draw from it.

Sorting a whole vocabulary for every token is waste: the draw nearly always falls among the first
few dozen candidates. So a prefix of the order is made, and a longer one only when the shorter did
not decide. The result never depends on how far the prefix grew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_FIRST_PREFIX = 64
_GROWTH = 8

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
    cut = len(values) - count
    threshold = np.partition(values, cut)[cut]
    ids = np.flatnonzero(values >= threshold)
    return ids[np.argsort(-values[ids], kind="stable")]


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
    weights = np.exp(scaled.astype(np.float64) - np.float64(best))
    weights[weights < min_p] = 0.0
    mass = float(weights.sum())
    for ids, is_whole in _growing_prefixes(scaled):
        kept = _truncate(np.cumsum(weights[ids]), mass, top_k, top_p, is_whole)
        if kept is None:
            continue
        target = uniform * (mass if kept.is_open else float(kept.cumulative[-1]))
        index = int(np.searchsorted(kept.cumulative, target, side="right"))
        if index < len(kept.cumulative):
            return int(ids[index])
        if not kept.is_open:
            # Rounding put the draw at the very end of the mass: the last id that has any.
            return int(ids[np.flatnonzero(weights[ids[:index]])[-1]])
    raise AssertionError("the whole vocabulary is never an open prefix")


class _Kept(NamedTuple):
    cumulative: NDArray[np.float64]
    is_open: bool
    """More ids are kept than this prefix holds; their mass counts."""


def _truncate(
    cumulative: NDArray[np.float64], mass: float, top_k: int, top_p: float, is_whole: bool
) -> _Kept | None:
    """Cut a prefix at top_k, then at top_p; None when it is too short to tell where."""
    is_open = not is_whole
    if top_k > 0:
        if is_open and len(cumulative) < top_k:
            return None
        cumulative, is_open = cumulative[:top_k], False
        mass = float(cumulative[-1])
    if top_p < 1.0:
        reached = int(np.searchsorted(cumulative, top_p * mass, side="left"))
        if is_open and reached == len(cumulative):
            return None
        cumulative, is_open = cumulative[: reached + 1], False
    return _Kept(cumulative, is_open)


def _growing_prefixes(values: Floats) -> Iterator[tuple[Ids, bool]]:
    count = _FIRST_PREFIX
    while count < len(values):
        ids = ordered_prefix(values, count)
        yield ids, len(ids) == len(values)
        count *= _GROWTH
    yield ordered_prefix(values, len(values)), True
