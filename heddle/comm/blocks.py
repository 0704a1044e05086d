"""Blocks of a collective: the leading axis counts ranks, and sums run in ascending group order.

A fixed order gives every rank, every run and every communicator that uses it the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def require_blocks(op: str, tensor: torch.Tensor, world_size: int) -> None:
    """Refuse a tensor `[N, ...]` whose leading axis is not the group size.

    Raises:
        ValueError: the leading axis differs from `world_size`.
    """
    if tensor.dim() == 0 or tensor.shape[0] != world_size:
        raise ValueError(
            f"{op} got shape {tuple(tensor.shape)}; the leading axis must be the group size "
            f"{world_size}"
        )


def is_narrow(dtype: torch.dtype) -> bool:
    """True for floats that are added in float32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def sum_in_order(blocks: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of equal-shaped tensors, added in sequence order.

    16-bit floats are added in float32 and rounded once, so the error does not grow with the group.

    Args:
        blocks: at least one.
        out: takes the sum, of the same shape and dtype; None: a fresh tensor.
    """
    dtype = blocks[0].dtype
    if len(blocks) == 1:
        out = torch.empty_like(blocks[0]) if out is None else out
        return out.copy_(blocks[0])
    # A conversion to the same dtype costs as much as the sum itself where tensors are small.
    narrow = is_narrow(dtype)
    if narrow:
        total = blocks[0].to(torch.float32) + blocks[1]
    else:
        total = torch.add(blocks[0], blocks[1], out=out)
    for block in blocks[2:]:
        total += block
    if not narrow:
        return total
    return total.to(dtype) if out is None else out.copy_(total)
