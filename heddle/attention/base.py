"""What a model asks of attention: one call per layer, whatever the layout.

Legend: `M` this rank's rows in the step (padded), `h` query-head lanes of this rank (ceil(H/tp)),
`Ks` kv heads that this rank's slice stores, `D` head width.
"""

from __future__ import annotations

from typing import Protocol

import torch


class StepAttention(Protocol):
    """The attention of one step on one rank: writes new KV, exchanges, attends, merges."""

    def gqa(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Grouped-query attention.

        Args:
            layer: index of the layer.
            query: `[M, h, D]`, rotary applied; lanes beyond this rank's own heads are ignored.
            key: `[M, Ks, D]`, rotary applied, all kv heads of this rank's slice.
            value: `[M, Ks, D]`.
        Returns:
            `[M, h, D]`; pad rows and pad lanes hold zeros.
        """
        ...

    def mla(
        self,
        layer: int,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Multi-head latent attention.

        Args:
            layer: index of the layer.
            query_nope: `[M, h, nope]`.
            query_rope: `[M, h, rope]`, rotary applied.
            latent: `[M, lat + rope]`: normalised latent, then the rotary key shared by all heads.
            key_up: `[h, nope, lat]`, key up-projection of this rank's heads.
            value_up: `[h, lat, v]`, value up-projection of this rank's heads.
            scale: softmax scale, any rotary factor included.
        Returns:
            `[M, h, v]`; pad rows and pad lanes hold zeros.
        """
        ...
