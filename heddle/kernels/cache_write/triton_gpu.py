"""The cache write in Triton: a program copies a piece of one row; nothing is gathered before.

Which rows are stored is seen on the device, so the call is the same in every step: it can be
captured in a graph.

Legend: see `reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from heddle.kernels.triton_math import OPTIONS, padded

_TILE = 2048
"""Elements of a piece."""


@triton.jit  # type: ignore[untyped-decorator]
def _write_kernel(
    pool,  # [slots, Ks, W]
    slot_mapping,  # [R]
    rows,  # [R, Ks, W]
    row_stride,
    head_stride,
    num_heads: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    element = tl.program_id(1) * block + tl.arange(0, block)
    is_stored = element < tl.where(slot >= 0, num_heads * width, 0)
    source = row * row_stride + element // width * head_stride + element % width
    values = tl.load(rows + source, mask=is_stored)
    target = pool + slot * (num_heads * width) + element
    tl.store(target, values.to(pool.dtype.element_ty), mask=is_stored)


def write(pool: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """See `reference.write`; any strides of rows, but their elements lie side by side."""
    num_rows, num_heads, width = rows.shape
    if rows.numel() == 0:
        return
    block = min(_TILE, padded(num_heads * width))
    _write_kernel[(num_rows, triton.cdiv(num_heads * width, block))](
        pool, slot_mapping, rows, *rows.stride()[:2], num_heads, width, block, **OPTIONS
    )
