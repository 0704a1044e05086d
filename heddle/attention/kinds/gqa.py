"""Grouped-query attention: several query heads read one key-value head. Both forms of a query are
the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.kernels.paged_decode.plan import RowWidths
from heddle.layout.heads import HeadRun


def side_by_side(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`[M, Ks, D]` each -> `[M, Ks, 2D]`; the tensor itself where they are halves of one."""
    width = key.shape[-1]
    if (
        key.stride() == value.stride() == (2 * width * key.shape[1], 2 * width, 1)
        and value.storage_offset() == key.storage_offset() + width
        and key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    ):
        return key.as_strided((*key.shape[:2], 2 * width), key.stride())
    return torch.cat((key, value), dim=-1)


class GQAKind:
    """One layer's queries, keys and values; shapes as in `StepOps.gqa`."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        own_lanes: slice = slice(None),
    ) -> None:
        self.head_dim = query.shape[-1]
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.sinks = sinks
        self.travelling_query = query
        self.staying_query = query[:, own_lanes]
        self.rows = side_by_side(key, value)  # [M, Ks, 2D]

    @property
    def widths(self) -> RowWidths:
        """Key, then value."""
        return RowWidths(self.head_dim, self.head_dim, self.head_dim)

    def stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value halves of stored rows, as views."""
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Same as `stored`."""
        return self.stored(rows)

    def staying_runs(self, runs: Sequence[HeadRun]) -> Sequence[HeadRun]:
        """Same head map."""
        return runs

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """Nothing to undo."""
        return out
