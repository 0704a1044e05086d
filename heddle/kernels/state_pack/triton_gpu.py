"""Packing in Triton: each program moves some lanes of one row to one destination.

There is no kernel for the way back: what arrives is merged where it lies, through the views of
`reference.unpack`.

Legend: see `reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from heddle.kernels.state_pack.reference import Grid
from heddle.kernels.triton_math import OPTIONS, padded

_TILE = 4096
"""Numbers of a tile."""


@triton.jit  # type: ignore[untyped-decorator]
def _pack_kernel(
    out,  # [rows, k * h, Dv]
    lse,  # [rows, k * h]
    blocks,  # [N, n, h, Dv + 1]
    num_rows,
    num_lanes,
    num_replicas,
    row_block_rows,
    out_row_stride,
    out_lane_stride,
    lse_row_stride,
    lse_lane_stride,
    width: tl.constexpr,
    block_width: tl.constexpr,
    block_lanes: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)  # destination and row: the first two axes of the blocks
    destination, row = place // num_rows, place % num_rows
    source_row = destination % num_replicas * row_block_rows + row
    lanes = tl.program_id(1) * block_lanes + tl.arange(0, block_lanes)
    source_lanes = destination // num_replicas * num_lanes + lanes
    columns = tl.arange(0, block_width)
    is_lane = lanes < num_lanes
    cells = is_lane[:, None] & (columns < width)[None, :]

    out_at = out + source_row * out_row_stride + source_lanes[:, None] * out_lane_stride
    lse_at = lse + source_row * lse_row_stride + source_lanes * lse_lane_stride
    target = blocks + (place * num_lanes + lanes) * (width + 1)
    values = tl.load(out_at + columns[None, :], mask=cells)
    tl.store(target[:, None] + columns[None, :], values, mask=cells)
    tl.store(target + width, tl.load(lse_at, mask=is_lane), mask=is_lane)


def pack(out: torch.Tensor, lse: torch.Tensor, grid: Grid) -> torch.Tensor:
    """See `reference.pack`; any strides, but the columns of `out` lie side by side."""
    rows, all_lanes, width = out.shape
    num_rows = rows if grid.is_copy else rows // grid.num_replicas
    num_lanes = all_lanes // grid.slice_size
    num_ranks = grid.num_replicas * grid.slice_size
    blocks = out.new_empty((num_ranks, num_rows, num_lanes, width + 1))
    if blocks.numel() == 0:
        return blocks
    block_width = padded(width)
    block_lanes = min(padded(num_lanes), max(1, _TILE // block_width))
    _pack_kernel[(num_ranks * num_rows, triton.cdiv(num_lanes, block_lanes))](
        out,
        lse,
        blocks,
        num_rows,
        num_lanes,
        grid.num_replicas,
        0 if grid.is_copy else num_rows,
        *out.stride()[:2],
        *lse.stride(),
        width,
        block_width,
        block_lanes,
        **OPTIONS,
    )
    return blocks
