"""What a product of rows with a packed weight means.

Legend: `M` rows, `K` inputs, `N` outputs.
"""

from __future__ import annotations

import torch

from heddle.kernels.linear.base import Weight


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight + bias`.

    Args:
        x: `[M, K]`.
        weight: `[K, N]`, plain or packed.
        bias: `[N]`; None: none.

    Returns:
        `[M, N]`.
    """
    matrix = weight if isinstance(weight, torch.Tensor) else weight.matrix()
    return x @ matrix if bias is None else torch.addmm(bias, x, matrix)
