"""Depthwise causal convolution over the tokens of a sequence, with a gated-linear activation.

    out_t = silu(bias + sum over j of weight_j * x_(t - W + 1 + j))

The first rows of a run look back at `W - 1` rows before it, which the caller puts in front: the
remembered inputs of the sequence, the end of another rank's segment, or zeros.

Legend: `T` tokens, `C` channels, `W` taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Convolution:
    """Weights of one layer's convolution on one rank."""

    weight: torch.Tensor  # [W, C]: the last tap meets the token itself
    bias: torch.Tensor | None = None  # [C]

    @property
    def num_history(self) -> int:
        """Rows that an output looks back: `W - 1`."""
        return len(self.weight) - 1

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., W - 1 + T, C]` -> `[..., T, C]`."""
        num_tokens = rows.shape[-2] - self.num_history
        total = rows[..., :num_tokens, :] * self.weight[0]
        for tap in range(1, len(self.weight)):
            total.addcmul_(rows[..., tap : tap + num_tokens, :], self.weight[tap])
        return functional.silu(total if self.bias is None else total.add_(self.bias))
