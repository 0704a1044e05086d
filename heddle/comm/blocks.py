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


def sum_in_order(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of equal-shaped tensors, added in sequence order; a fresh tensor of their dtype.

    16-bit floats are added in float32 and rounded once, so the error does not grow with the group.
    """
    dtype = blocks[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = blocks[0].to(wide, copy=True)
    for block in blocks[1:]:
        total += block
    return total.to(dtype)
