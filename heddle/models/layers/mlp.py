"""The gated feed-forward block: `down(act(gate(x)) * up(x))`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.attention.base import StepOps
from heddle.kernels.silu_mul.reference import silu_mul
from heddle.models.layers.activation import Activation
from heddle.models.layers.linear import ColumnPart, Linear, load_columns, load_rows
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class MLP:
    """One rank's share of the inner dimension."""

    gate_up: Linear
    """Gate outputs, then up outputs."""
    down: Linear
    activation: Activation = silu_mul

    def __call__(self, x: torch.Tensor, ops: StepOps | None = None) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`; adapters need the step."""
        return self.down(self.activation(self.gate_up(x, ops)), ops)


def load_mlp(
    loader: WeightLoader,
    shard: Shard,
    name: str,
    hidden_size: int,
    inner_size: int,
    *,
    has_bias: bool = False,
    activation: Activation | None = None,
    fused: str | None = None,
) -> MLP:
    """Load a rank's share of a block.

    Args:
        loader: of the checkpoint.
        shard: place among the tensor-parallel ranks.
        name: of the block's tensors.
        hidden_size: `E`.
        inner_size: of the whole block.
        has_bias: all of its matrices have one.
        activation: of the gate; None: silu.
        fused: what the checkpoint calls one matrix of gate, then up; None: it has two.
    """
    first, last = span = shard.cut(inner_size)
    room = last - first
    if fused is None:
        parts = [
            ColumnPart(f"{name}.{side}_proj", inner_size, span, room, has_bias)
            for side in ("gate", "up")
        ]
    else:
        up = (inner_size + first, inner_size + last)
        whole = (f"{name}.{fused}", 2 * inner_size)
        parts = [ColumnPart(*whole, side, room, has_bias) for side in (span, up)]
    return MLP(
        gate_up=load_columns(loader, parts, hidden_size),
        down=load_rows(
            loader, shard, f"{name}.down_proj", hidden_size, inner_size, span, has_bias=has_bias
        ),
        activation=activation or loader.kernels.silu_mul,
    )
