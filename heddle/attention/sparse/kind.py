r"""Latent attention whose stored row also holds the key of the indexer.

    layer[slot, 0] = | latent | rotary key | index key |
                       \---- met by a query ---/

One write and one gather move all three. Only the first two meet a query.

Legend: `M` local rows, `h` lanes, `L` keys, `W` width of a stored row.
"""

from __future__ import annotations

import torch

from heddle.attention.base import IndexRows
from heddle.attention.kinds.mla import MLAKind


class SparseLatentKind(MLAKind):
    """One layer's queries, latents and index rows; shapes as in `StepOps.mla`."""

    def __init__(
        self,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
        index: IndexRows,
        own_lanes: slice = slice(None),
    ) -> None:
        super().__init__(query_nope, query_rope, latent, key_up, value_up, scale, own_lanes)
        self.index = index
        self.key_width = latent.shape[-1]
        self.rows = torch.cat((latent, index.index_key), dim=-1).unsqueeze(1)  # [M, 1, W]

    def stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent and rotary key are the key, the latent alone is the value."""
        return super().stored(rows[..., : self.key_width])

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Up-projected keys and values of this rank's heads."""
        return super().expand(rows[..., : self.key_width])

    def index_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """`[L, Di]` of stored rows `[L, 1, W]`, as a view."""
        return rows[:, 0, self.key_width :]
