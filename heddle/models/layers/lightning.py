"""The lightning attention layer of MiniMax: linear attention whose decay is fixed per head.

    q, k, v = silu(x @ W)
    out     = (norm(recurrence) * sigmoid(x @ W_g)) @ W_o      one mean over all heads

The decay of head j of H in layer l of n is `exp(-2^(-8 (j + 1) / H) * (1 - l / (n - 1) + 1e-5))`,
with `1e-5` also beside `n - 1`.

Legend: `M` rows, `h` heads of this rank, `D` head width, `E` hidden size.

Source: arXiv 2401.04658 and the MiniMax model code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from heddle.attention.base import StepOps
from heddle.attention.recurrent.terms import RecurrentInputs, Terms
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.models.base import BuildContext
from heddle.models.layers.head_group_norm import HeadGroupNorm, load_head_group_norm
from heddle.models.layers.linear import Linear, load_rows
from heddle.models.layers.recurrent_weights import load_spans
from heddle.models.layers.rotary import Turn

_NORM_EPS = 1e-6  # of the published model code, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class Lightning:
    """Projections around one layer's recurrence."""

    layer: int
    projection: Linear
    """Of each own head: query, key, value. Then the gates of all own heads."""
    log_decay: torch.Tensor  # [h], float32 or wider
    norm: HeadGroupNorm
    output: Linear

    def __call__(self, x: torch.Tensor, rotation: Turn, ops: StepOps) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        del rotation  # order is in the recurrence itself
        projected = self.projection(x)
        values = projected.shape[1] // 4
        channels, gate = projected.tensor_split((3 * values,), dim=1)
        mixed = ops.recurrent(
            self.layer, RecurrentInputs(functional.silu(channels), None, self._terms)
        )
        gated = self.norm(mixed) * gate.to(mixed.dtype).sigmoid().view(mixed.shape)
        return self.output(gated.flatten(1).to(x.dtype), ops)

    def _terms(self, channels: torch.Tensor) -> Terms:
        heads = len(self.log_decay)
        rows, width = len(channels), channels.shape[1] // (3 * heads)
        wide = channels.to(self.log_decay.dtype).view(rows, heads, 3, width)
        query, key, value = wide.unbind(2)
        return Terms(query, key, value, self.log_decay.expand(rows, heads))


def load_lightning(
    context: BuildContext, layout: RecurrentLayout, layer: int, name: str
) -> Lightning:
    """Load a rank's heads of the layer called `name`."""
    config, loader = layout.config, context.loader
    (first, last), width = layout.head_range(context.shard.rank), config.value_dim
    values, hidden_size = config.num_heads * width, context.config.hidden_size
    mixed = load_spans(
        loader,
        f"{name}.qkv_proj.weight",
        (3 * values, hidden_size),
        [(3 * first * width, 3 * last * width)],
    )
    gate = loader.load(
        f"{name}.output_gate.weight", (values, hidden_size), (first * width, last * width)
    )
    decays = log_decays(config.num_heads, layer, context.config.num_layers)
    wide = torch.promote_types(loader.dtype, torch.float32)
    return Lightning(
        layer=layer,
        projection=Linear.of(torch.cat([mixed, gate]), loader=loader),
        log_decay=decays[first:last].to(loader.device, wide),
        norm=load_head_group_norm(loader, context.shard, layout, f"{name}.norm", _NORM_EPS),
        output=load_rows(
            loader,
            context.shard,
            f"{name}.out_proj",
            hidden_size,
            values,
            (first * width, last * width),
        ),
    )


def log_decays(num_heads: int, layer: int, num_layers: int) -> torch.Tensor:
    """`[num_heads]` float64, all below zero.

    Example:
        >>> log_decays(2, layer=0, num_layers=3).tolist()
        [-0.062500625, -0.0039062890625]
    """
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    heads = torch.arange(1, num_heads + 1, dtype=torch.float64)
    return -torch.exp2(-8 * heads / num_heads) * factor
