"""Merge of partial attention states in Triton: one program per row and some lanes.

States are read where they lie, through their strides: side by side with their lse as an all-to-all
brings them, or apart as split kernels leave them.

Legend: `X` states, `R` rows, `h` lanes, `Dv` value width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from heddle.kernels.triton_math import OPTIONS, padded

_TILE = 2048
"""Numbers of an output tile."""


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    outs,  # [X, R, h, Dv]
    lses,  # [X, R, h]
    visible,  # [X, R, h] bytes
    merged_out,  # [R, h, Dv]
    merged_lse,  # [R, h]
    num_states,
    num_lanes,
    out_state_stride,
    out_row_stride,
    out_lane_stride,
    lse_state_stride,
    lse_row_stride,
    lse_lane_stride,
    seen_state_stride,
    seen_row_stride,
    seen_lane_stride,
    width: tl.constexpr,
    block_width: tl.constexpr,
    block_lanes: tl.constexpr,
    has_visible: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * block_lanes + tl.arange(0, block_lanes)
    columns = tl.arange(0, block_width)
    is_lane = lanes < num_lanes
    cells = is_lane[:, None] & (columns < width)[None, :]
    lse_at = lses + row * lse_row_stride + lanes * lse_lane_stride
    seen_at = visible + row * seen_row_stride + lanes * seen_lane_stride
    out_at = outs + row * out_row_stride + lanes[:, None] * out_lane_stride + columns[None, :]

    peak = tl.full([block_lanes], float("-inf"), merged_lse.dtype.element_ty)
    for state in range(num_states):
        lse = tl.load(lse_at + state * lse_state_stride, mask=is_lane, other=float("-inf"))
        if has_visible:
            seen = tl.load(seen_at + state * seen_state_stride, mask=is_lane, other=0) != 0
            lse = tl.where(seen, lse, float("-inf"))
        peak = tl.where(lse > peak, lse, peak)
    # Where nothing was seen any finite number does; NaN and inf of a part reach the total below.
    anchor = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)

    total = tl.zeros([block_lanes], merged_lse.dtype.element_ty)
    sums = tl.zeros([block_lanes, block_width], merged_lse.dtype.element_ty)
    for state in range(num_states):
        lse = tl.load(lse_at + state * lse_state_stride, mask=is_lane, other=float("-inf"))
        seen = lse != float("-inf")
        if has_visible:
            seen = tl.load(seen_at + state * seen_state_stride, mask=is_lane, other=0) != 0
        is_broken = seen & ((lse != lse) | (tl.abs(lse) == float("inf")))
        score = tl.where(seen & (is_broken == 0), lse - anchor, float("-inf"))
        share = tl.where(is_broken, float("nan"), tl.exp(score))
        total += share
        # Payload of a part that saw nothing is never read: it may hold anything.
        out = tl.load(out_at + state * out_state_stride, mask=cells & seen[:, None], other=0.0)
        sums += share[:, None] * out

    has_keys = total != 0.0  # the peak adds 1; true of NaN
    total = tl.where(has_keys, total, 1.0)
    lse = tl.where(has_keys, anchor + tl.log(total), float("-inf"))
    places = row * num_lanes + lanes
    tl.store(merged_lse + places, lse, mask=is_lane)
    place = merged_out + places[:, None] * width + columns[None, :]
    tl.store(place, sums / total[:, None], mask=cells)


def merge(
    outs: torch.Tensor, lses: torch.Tensor, visible: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.merge`; any strides, but the columns of `outs` lie side by side."""
    num_states, num_rows, num_lanes, width = outs.shape
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=lses.dtype, device=lses.device)
    if lse.numel() == 0:
        return out, lse
    seen = lses if visible is None else visible.expand(lses.shape).view(torch.uint8)
    block_width = padded(width)
    block_lanes = min(padded(num_lanes), max(1, _TILE // block_width))
    _merge_kernel[(num_rows, triton.cdiv(num_lanes, block_lanes))](
        outs,
        lses,
        seen,
        out,
        lse,
        num_states,
        num_lanes,
        *outs.stride()[:3],
        *lses.stride(),
        *seen.stride(),
        width,
        block_width,
        block_lanes,
        visible is not None,
        **OPTIONS,
    )
    return out, lse
