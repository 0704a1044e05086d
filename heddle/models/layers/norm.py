"""Root-mean-square norm."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    __slots__ = ("_eps", "_shape", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = tuple(weight.shape)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., n]` -> `[..., n]`, same dtype."""
        return functional.rms_norm(x, self._shape, self._weight, self._eps)
