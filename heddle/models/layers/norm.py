"""Root-mean-square norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    With a weight wider than the rows all of it is computed in the weight's dtype and rounded once.
    """

    weight: torch.Tensor
    """`[n]`, or `[heads, n]` for a norm over each head."""
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., n]` -> `[..., n]`, same dtype; zeros stay zeros."""
        if self.weight.dtype != x.dtype:
            return plain_norm(x.to(self.weight.dtype), self.eps).mul_(self.weight).to(x.dtype)
        return plain_norm(x, self.eps).mul_(self.weight)


def plain_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm without a weight, a fresh tensor: `[..., n]` -> `[..., n]`, same dtype."""
    size = x.shape[-1]
    if x.is_cpu and x.dtype.itemsize >= 4:
        # The library call is a chain of passes here: 512 rows of 576 take it 3.7 times as long.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scaled: torch.Tensor = x * length.square_().div_(size).add_(eps).rsqrt_()
        return scaled
    return functional.rms_norm(x, (size,), None, eps)
