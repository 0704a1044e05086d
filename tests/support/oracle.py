"""Dense attention in float64, one row and head at a time; it uses nothing of the package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def dense_row(query: Array, key: Array, value: Array, scale: float) -> tuple[Array, float]:
    """One query `[D]` over keys `[S, D]` and values `[S, Dv]`: output and natural log-sum-exp."""
    if len(key) == 0:
        return np.zeros(value.shape[1]), -np.inf
    scores = (key @ query) * scale
    peak = scores.max()
    weights = np.exp(scores - peak)
    total = weights.sum()
    return weights @ value / total, float(peak + np.log(total))


def dense_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    kv_of_lane: Sequence[int | None],
    visible: Sequence[int],
    scale: float,
) -> tuple[Array, Array]:
    """All rows and lanes.

    Args:
        query: `[R, Hq, D]`.
        key: `[L, K, D]`.
        value: `[L, K, Dv]`.
        kv_of_lane: kv head of each lane; None for pad lanes.
        visible: row i sees keys [0, visible[i]).
        scale: of the scores.
    Returns:
        out `[R, Hq, Dv]` and lse `[R, Hq]`.
    """
    query = np.asarray(query, dtype=np.float64)
    key = np.asarray(key, dtype=np.float64)
    value = np.asarray(value, dtype=np.float64)
    out = np.zeros((*query.shape[:2], value.shape[-1]))
    lse = np.full(query.shape[:2], -np.inf)
    for row, length in enumerate(visible):
        for lane, head in enumerate(kv_of_lane):
            if head is not None:
                out[row, lane], lse[row, lane] = dense_row(
                    query[row, lane], key[:length, head], value[:length, head], scale
                )
    return out, lse
