"""What the norm means, in plain torch.

    rms_norm      x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm  x += residual, then the same
    add           x += residual

Legend: `n` elements of a row.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of each row.

    With a weight wider than the rows all of it is computed in the weight's dtype and rounded once.

    Args:
        x: `[..., n]`.
        weight: `[n]`, or `[heads, n]` for rows `[..., heads, n]`.
        eps: added to the mean square; zeros stay zeros.

    Returns:
        A fresh tensor of the shape and dtype of `x`.
    """
    if weight.dtype != x.dtype:
        return plain_norm(x.to(weight.dtype), eps).mul_(weight).to(x.dtype)
    return plain_norm(x, eps).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add a residual to rows in place, and return the norm of the sum; shapes as in `rms_norm`."""
    return rms_norm(x.add_(residual), weight, eps)


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Add a residual to rows of the same shape and dtype, in place; the rows."""
    return x.add_(residual)


def plain_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm without a weight, a fresh tensor: `[..., n]` -> `[..., n]`, same dtype."""
    size = x.shape[-1]
    if x.is_cpu and x.dtype.itemsize >= 4:
        # The library call is a chain of passes here: 512 rows of 576 take it 3.7 times as long.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scaled: torch.Tensor = x * length.square_().div_(size).add_(eps).rsqrt_()
        return scaled
    return functional.rms_norm(x, (size,), None, eps)
