"""The one order of candidates: logit descending, then id ascending; and the draw from it.

Sorting a whole vocabulary for every token is waste: the draw nearly always falls among the first
few dozen candidates. So a prefix of the order is made, and a longer one only when the shorter did
not decide. The result never depends on how far the prefix grew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

    def weigh(logits: Floats) -> NDArray[np.float64]:
        weights: NDArray[np.float64] = np.exp(logits.astype(np.float64) - np.float64(best))
        weights[weights < min_p] = 0.0
        return weights

    if top_k > 0:
        ids = ordered_prefix(scaled, top_k)[:top_k]
        cumulative = np.cumsum(weigh(scaled[ids]))
        mass = float(cumulative[-1])
        prefixes: Iterable[_Prefix] = [_Prefix(ids, cumulative, is_open=False)]
    else:
        mass = float(weigh(scaled).sum())
        prefixes = (
            _Prefix(ids, np.cumsum(weigh(scaled[ids])), is_open=len(ids) < len(scaled))
            for ids in _growing_prefixes(scaled)
        )
    return _draw_from(prefixes, mass, top_p, uniform)


class _Prefix(NamedTuple):
    ids: Ids
    cumulative: NDArray[np.float64]
    is_open: bool
    """More ids are kept than these; their mass counts."""


def _draw_from(prefixes: Iterable[_Prefix], mass: float, top_p: float, uniform: float) -> int:
    """Draw from the first prefix that is long enough to tell."""
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


def _growing_prefixes(values: Floats) -> Iterator[Ids]:
    count = _FIRST_PREFIX
    while count < len(values):
        yield ordered_prefix(values, count)
        count *= _GROWTH
    yield ordered_prefix(values, len(values))
