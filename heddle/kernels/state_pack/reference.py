"""What packing means, in plain torch: output and lse side by side, by destination.

    out [rows, k * h, Dv], lse [rows, k * h]  ->  blocks [N, n, h, Dv + 1]

Block d goes to position d of the group, which owns row block `d % P'` and head block `d // P'`; of
copied rows it owns all. The lse is one more column, so it keeps all its bits.

Legend: `N = P' * k` ranks of the group, `P'` its PCP ranks, `k` its TP ranks, `n` rows and `h`
lanes that one rank owns, `Dv` value width.
Source: `heddle.attention.exchange.placement`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Grid(NamedTuple):
    """The rectangle of a group."""

    num_replicas: int
    """`P'`."""
    slice_size: int
    """`k`."""
    is_copy: bool
    """Every row block holds the same rows."""


def pack(out: torch.Tensor, lse: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Cut a partial state into the blocks of its destinations.

    Args:
        out: `[rows, k * h, Dv]`; rows are `n` for copied rows, else `P' * n`.
        lse: `[rows, k * h]`.
        grid: of the group.

    Returns:
        `[N, n, h, Dv + 1]`, contiguous; only moves.
    """
    packed = torch.cat([out, lse.unsqueeze(-1)], dim=-1)
    row_blocks = 1 if grid.is_copy else grid.num_replicas
    cut = packed.unflatten(1, (grid.slice_size, -1)).unflatten(0, (row_blocks, -1))
    blocks = cut.movedim(2, 0).expand(-1, grid.num_replicas, -1, -1, -1)  # [k, P', n, h, Dv + 1]
    return blocks.flatten(0, 1).contiguous()


def unpack(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of blocks, as views `[..., Dv]` and `[...]`: a merge reads them where they lie."""
    return blocks[..., :-1], blocks[..., -1]
