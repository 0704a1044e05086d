"""Which rows and heads of a gathered tensor belong to which member of a DCP group.

A group of `N = P' * k` ranks is a rectangle: `P'` PCP ranks times the `k` TP ranks of one slice.
Position `r` is row block `r % P'`, head block `r // P'`:

    rows owned by       head block 0   head block 1
      row block 0           r = 0          r = 2          P' = 2, k = 2
      row block 1           r = 1          r = 3

Distributed rows differ between row blocks, so a gathered tensor has `P' * n` rows. COPY rows are
the same on all of them: `n` rows, and each destination gets all of them.

Legend: `N` ranks of the group, `n` rows and `h` query-head lanes that one rank owns, `D` any width.
Only moves: every result holds the same bits as its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Rows and heads of one row class, over one DCP group."""

    num_replicas: int
    """`P'`: PCP ranks in the group."""
    slice_size: int
    """`k`: TP ranks in the group; they store the same kv heads."""
    num_rows: int
    """`n`: rows that one rank owns, pads included; equal on all ranks."""
    lanes: int
    """`h`: query-head lanes that one rank owns."""
    is_copy: bool
    """Whether all row blocks hold the same rows."""
    position: int
    """`r`: place in the group."""
    used_lanes: tuple[bool, ...] | None = None
    """Of the gathered lanes, those that hold a query head; None: all. The others stay nil."""
    has_slice_queries: bool = False
    """Whether each rank projects the queries of its whole slice, so that no head is missing."""

    @property
    def world_size(self) -> int:
        """`N`."""
        return self.num_replicas * self.slice_size

    @property
    def gathered_rows(self) -> int:
        """Rows of a gathered tensor: `n` for COPY rows, else `P' * n`."""
        return self.num_rows if self.is_copy else self.num_replicas * self.num_rows

    @property
    def gathered_lanes(self) -> int:
        """Heads of a gathered tensor: `k * h`."""
        return self.slice_size * self.lanes

    def assemble(self, blocks: torch.Tensor) -> torch.Tensor:
        """What an all-gather brought, as rows and heads.

        Args:
            blocks: `[N, n, h, ...]` over the DCP group, or `[k, n, h, ...]` over the slice for COPY
                rows.

        Returns:
            `[gathered_rows, k * h, ...]`.
        """
        rest = blocks.shape[3:]
        replicas = 1 if self.is_copy else self.num_replicas
        grid = blocks.reshape(self.slice_size, replicas, self.num_rows, self.lanes, *rest)
        return grid.movedim(0, 2).reshape(self.gathered_rows, self.gathered_lanes, *rest)

    def destinations(self, tensor: torch.Tensor) -> torch.Tensor:
        """Split by destination, the inverse of `assemble`.

        Args:
            tensor: `[gathered_rows, k * h, ...]`.

        Returns:
            `[N, n, h, ...]`: block `d` holds the rows and heads of position `d`.
        """
        rest = tensor.shape[2:]
        replicas = 1 if self.is_copy else self.num_replicas
        grid = tensor.reshape(replicas, self.num_rows, self.slice_size, self.lanes, *rest)
        blocks = grid.movedim(2, 0)
        blocks = blocks.expand(self.slice_size, self.num_replicas, *blocks.shape[2:])
        return blocks.reshape(self.world_size, self.num_rows, self.lanes, *rest)

    def own(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's part of gathered rows (at `dim`) and heads (at `dim + 1`), as a view."""
        head_block, row_block = divmod(self.position, self.num_replicas)
        first_row = 0 if self.is_copy else row_block * self.num_rows
        rows = tensor.narrow(dim, first_row, self.num_rows)
        return rows.narrow(dim + 1, head_block * self.lanes, self.lanes)

    def seen(self, visible: torch.Tensor) -> torch.Tensor:
        """Which partial states saw a key: pad lanes never do.

        Args:
            visible: bool `[N, gathered_rows]`.

        Returns:
            bool `[N, gathered_rows, k * h]`.
        """
        seen = visible.unsqueeze(-1).expand(-1, -1, self.gathered_lanes)
        if self.used_lanes is None:
            return seen
        return seen & _mask(self.used_lanes, visible.device)


@cache
def _mask(used_lanes: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(used_lanes, device=device)
