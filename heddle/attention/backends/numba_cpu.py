"""The backend of compiled kernels on a CPU: stored rows are read in place.

Few rows per sequence are bound by memory and meet their keys one by one; many rows, and the many
lanes of latent attention, are products of register tiles. What the kernels do not take (another
compute dtype, a width that is no multiple of 8) goes to the backend of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from heddle.attention.backends.base import KeyRange, Visible, checked_visible
from heddle.attention.backends.head_groups import heads_of_lanes
from heddle.attention.backends.torch_cpu import TorchBackend
from heddle.attention.state import AttentionState
from heddle.kernels.paged_decode.numba_cpu import paged_decode
from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.tiled_attention.numba_cpu import dense_attention, paged_attention
from heddle.kernels.tiled_attention.reference import dense_plan
from heddle.kernels.vectors import LANES
from heddle.layout.cache_rows import RowFormat
from heddle.layout.heads import HeadRun

MIN_TILED_LANES = 12
"""Lanes of a kv head, over neighbouring rows of a sequence, from which tiles are worth packing."""


class NumbaBackend(TorchBackend):
    """Exact on any float dtype; the kernels take float32, and the other backend the rest.

    Args:
        num_threads: of this rank; results do not depend on it.
    """

    name = "numba"

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: Sequence[HeadRun],
        visible: Visible,
        scale: float,
        softcap: float = 0.0,
    ) -> AttentionState:
        """See `AttentionBackend.attend`."""
        floats = query.dtype == key.dtype == value.dtype == torch.float32
        widths = (key.shape[-1], value.shape[-1])
        if not floats or any(width % LANES for width in widths) or scale <= 0:
            return super().attend(query, key, value, runs, visible, scale, softcap)
        plan = _plan_of(visible, query.shape[0], key.shape[0])
        heads = heads_of_lanes(query.shape[1], runs)
        found = dense_attention(query, key, value, plan, heads, scale, softcap, self.num_threads)
        return AttentionState(*found)

    def attend_paged(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        plan: PagedPlan,
        widths: RowWidths,
        runs: Sequence[HeadRun],
        scale: float,
        softcap: float = 0.0,
        row_format: RowFormat | None = None,
    ) -> AttentionState:
        """See `PagedBackend.attend_paged`."""
        heads = heads_of_lanes(query.shape[1], runs)
        rows_each = query.shape[0] / len(plan.block_tables)
        lanes_each = query.shape[1] / rows.shape[1]
        kernel = paged_attention if rows_each * lanes_each >= MIN_TILED_LANES else paged_decode
        return AttentionState(
            *kernel(query, rows, plan, widths, heads, scale, softcap, row_format, self.num_threads)
        )


def _plan_of(visible: Visible, num_rows: int, num_keys: int) -> PagedPlan:
    """Ranges as a plan, made once where the ranges can keep it."""
    if not isinstance(visible, KeyRange):
        return dense_plan(*checked_visible(visible, num_rows, num_keys), num_keys)
    key = f"dense {num_rows} {num_keys}"
    if key not in visible.kept:
        first, end = checked_visible(visible, num_rows, num_keys)
        first, end = np.ascontiguousarray(first), np.ascontiguousarray(end)
        visible.kept[key] = dense_plan(first, end, num_keys)
    plan: PagedPlan = visible.kept[key]
    return plan
