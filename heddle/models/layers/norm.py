"""Root-mean-square norm."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from heddle.kernels.registry import Kernels, create_kernels


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    With a weight wider than the rows all of it is computed in the weight's dtype and rounded once.
    """

    weight: torch.Tensor
    """`[n]`, or `[heads, n]` for a norm over each head."""
    eps: float
    kernels: Kernels = field(default_factory=partial(create_kernels, "torch"), repr=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., n]` -> `[..., n]`, same dtype; zeros stay zeros."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of `x + residual`, which `x` becomes; shapes as above."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
