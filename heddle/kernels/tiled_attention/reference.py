"""What attention of many rows means, in plain torch: the same as that of few rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from heddle.kernels.paged_decode.plan import IntArray, PagedPlan, RowWidths
from heddle.kernels.paged_decode.reference import paged_decode
from heddle.layout.cache_rows import RowFormat


def paged_attention(
    query: torch.Tensor,
    rows: torch.Tensor,
    plan: PagedPlan,
    widths: RowWidths,
    kv_head_of_lane: npt.NDArray[np.int32],
    scale: float,
    softcap: float = 0.0,
    row_format: RowFormat | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each row over its own keys of the pool; see `paged_decode`."""
    return paged_decode(query, rows, plan, widths, kv_head_of_lane, scale, softcap, row_format)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: PagedPlan,
    kv_head_of_lane: npt.NDArray[np.int32],
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each row over its own range of given keys.

    Keys that no row meets are never read and may hold NaN.

    Args:
        query: `[R, Hq, Dq]`.
        key: `[L, Ks, Dq]`, any strides.
        value: `[L, Ks, Dv]`, any strides; may alias `key`.
        plan: from `dense_plan`: which keys each row meets.
        kv_head_of_lane: `[Hq]`: the kv head that each lane reads; -1: none, the lane comes out nil.
        scale: multiplies the scores; part of the lse.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c); 0: none.

    Returns:
        out `[R, Hq, Dv]` and the natural lse `[R, Hq]`, float32 or wider; exactly 0 and -inf where
        nothing is met.
    """
    widths = RowWidths(key.shape[-1], key.shape[-1], value.shape[-1])
    rows = torch.cat((key, value), dim=-1)
    return paged_decode(query, rows, plan, widths, kv_head_of_lane, scale, softcap)


def dense_plan(first: IntArray, end: IntArray, num_keys: int) -> PagedPlan:
    """Ranges of keys that lie one below the other: one sequence in one block.

    Args:
        first: `[R]`: row i meets keys [first[i], end[i]); none where they are equal.
        end: `[R]`.
        num_keys: `L`.
    """
    num_rows = len(first)
    return PagedPlan(
        np.zeros((1, 1), np.int64), np.zeros(num_rows, np.int64), first, end, max(1, num_keys)
    )
