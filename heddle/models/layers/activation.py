"""Gated activations: two halves of a product become one, `act(gate) * up`.

Legend: `M` rows, `i` inner width.

Source: gated units, arXiv 2002.05202; the clamped form, the gpt-oss model code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from heddle.kernels.registry import Kernels

Activation = Callable[[torch.Tensor], torch.Tensor]
"""`[M, 2i]` -> `[M, i]`."""


def gated_gelu_tanh(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(first half) * second half`, the tanh form of gelu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """`gate * sigmoid(alpha * gate) * (up + 1)`, gate below `limit`, up within `limit` of 0.

    Gate and up alternate in its input, as the checkpoints store them, so nothing need be moved.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[M, 2i]` -> `[M, i]`."""
        gate = gate_up[..., 0::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (gate * self.alpha).sigmoid_().mul_(gate).mul_(up.add_(1))


def activation_of(name: Literal["silu", "gelu_tanh"], kernels: Kernels) -> Activation:
    """The activation that a configuration names."""
    return kernels.silu_mul if name == "silu" else gated_gelu_tanh
