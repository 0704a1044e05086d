"""Multi-head latent attention: one stored row per token, shared by all heads.

Two forms of the same scores. Absorbed: the key up-projection is folded into the query, which then
meets latents as they lie; partials merge in latent space and the value up-projection follows.
Per-head: latents are up-projected to keys and values, which pays off when many rows share them.

    q_nope . (U_k c) = (U_k^T q_nope) . c            sum_t p_t (U_v c_t) = U_v (sum_t p_t c_t)

Source: docs/exact-merge.md, "Latent attention".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from heddle.kernels.paged_decode.plan import RowWidths
from heddle.layout.heads import HeadRun


class MLAKind:
    """One layer's queries and latents; shapes as in `StepOps.mla`."""

    def __init__(
        self,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
        own_lanes: slice = slice(None),
    ) -> None:
        self.query_nope = query_nope
        self.query_rope = query_rope
        self.key_up = key_up
        self.value_up = value_up
        self.own_lanes = own_lanes
        self.latent_width = key_up.shape[-1]
        self.scale = scale
        self.softcap = 0.0
        self.sinks: torch.Tensor | None = None
        self.rows = latent.unsqueeze(1)  # [M, 1, lat + rope]

    @cached_property
    def travelling_query(self) -> torch.Tensor:
        """`[M, h, lat + rope]`: absorbed."""
        absorbed = torch.einsum("mhd,hdl->mhl", self.query_nope, self.key_up)
        return torch.cat((absorbed, self.query_rope), dim=-1)

    @cached_property
    def staying_query(self) -> torch.Tensor:
        """`[M, h, nope + rope]`: per head."""
        own = self.own_lanes
        return torch.cat((self.query_nope[:, own], self.query_rope[:, own]), dim=-1)

    @property
    def widths(self) -> RowWidths:
        """The whole row is the key, its latent part the value."""
        return RowWidths(self.rows.shape[-1], 0, self.latent_width)

    def stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole row is the key, its latent part the value."""
        return rows, rows[..., : self.latent_width]

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Up-projected keys `[L, h, nope + rope]` and values `[L, h, v]` of this rank's heads."""
        latent = rows[:, 0, : self.latent_width]  # [L, lat]
        rope = rows[:, :, self.latent_width :]  # [L, 1, rope]
        key = torch.einsum("tl,hdl->thd", latent, self.key_up[self.own_lanes])
        value = torch.einsum("tl,hlv->thv", latent, self.value_up)
        return torch.cat((key, rope.expand(-1, key.shape[1], -1)), dim=-1), value

    def staying_runs(self, runs: Sequence[HeadRun]) -> Sequence[HeadRun]:
        """Each lane reads its own expanded head."""
        return [HeadRun(lane, lane, lane + 1) for run in runs for lane in range(run.start, run.end)]

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """Value up-projection of `[R, h, lat]`, in the width of the partial: it may merge on."""
        return torch.einsum("rhl,hlv->rhv", out, self.value_up.to(out.dtype))
