"""The Mamba-2 layer of Bamba.

    z, (x, B, C), dt = x @ W                    B and C are shared by groups of heads
    x, B, C          = silu(convolution)
    dt               = clamp(softplus(dt + bias)),   log decay = -exp(A) * dt
    y                = recurrence(query C, key B, value dt * x) + D * x
    out              = norm(y * silu(z)) @ W_o      one mean per group of heads

Legend: `M` rows, `h` heads of this rank, `K` width of B and C (the state), `V` width of a head, `E`
hidden size.

Source: arXiv 2405.21060 and the Bamba model code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from heddle.attention.base import StepOps
from heddle.attention.recurrent.convolution import Convolution
from heddle.attention.recurrent.terms import RecurrentInputs, Terms
from heddle.config.model import RecurrentConfig
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.models.base import BuildContext
from heddle.models.layers.head_group_norm import HeadGroupNorm, load_head_group_norm
from heddle.models.layers.linear import Linear, load_rows
from heddle.models.layers.recurrent_weights import load_convolution, load_head_vector, load_spans
from heddle.models.layers.rotary import Turn
from heddle.models.weights.source import Span


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Projections around one layer's recurrence. All inputs come from one product."""

    layer: int
    config: RecurrentConfig
    projection: Linear
    """z, then the channels of the convolution (x, B, C), then dt."""
    convolution: Convolution
    key_index: torch.Tensor  # [h] int64: group of each head, from the rank's first one
    decay_rate: torch.Tensor  # [h], exp(A)
    step_bias: torch.Tensor  # [h]
    skip: torch.Tensor  # [h], D
    norm: HeadGroupNorm
    output: Linear

    def __call__(self, x: torch.Tensor, rotation: Turn, ops: StepOps) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        del rotation  # order is in the recurrence itself
        heads, width = len(self.key_index), self.config.value_dim
        z, channels, step = torch.split(
            self.projection(x), [heads * width, self.convolution.weight.shape[1], heads], dim=-1
        )

        def terms(convolved: torch.Tensor) -> Terms:
            return self._terms(convolved, step)

        mixed = ops.recurrent(self.layer, RecurrentInputs(channels, self.convolution, terms))
        gate = functional.silu(z.to(mixed.dtype)).view(mixed.shape)
        return self.output(self.norm(mixed * gate).flatten(1).to(x.dtype), ops)

    def _terms(self, convolved: torch.Tensor, step: torch.Tensor) -> Terms:
        dtype, config, rows = self.decay_rate.dtype, self.config, len(convolved)
        values = len(self.key_index) * config.value_dim
        groups = (convolved.shape[1] - values) // 2
        value, key, query = torch.split(convolved.to(dtype), [values, groups, groups], dim=-1)
        value = value.reshape(rows, len(self.key_index), config.value_dim)
        key, query = (
            part.reshape(rows, groups // config.key_dim, config.key_dim) for part in (key, query)
        )
        size = functional.softplus(step.to(dtype) + self.step_bias).clamp(*config.time_step_limit)
        return Terms(
            query=query[:, self.key_index],
            key=key[:, self.key_index],
            value=value * size[..., None],
            log_decay=-self.decay_rate * size,
            skip=value * self.skip[:, None],
        )


def load_mamba2(context: BuildContext, layout: RecurrentLayout, layer: int, name: str) -> Mamba2:
    """Load a rank's heads of the layer called `name`."""
    config, loader, rank = layout.config, context.loader, context.shard.rank
    heads, width, hidden_size = (
        layout.head_range(rank),
        config.value_dim,
        context.config.hidden_size,
    )
    values, value_span = config.num_heads * width, (heads[0] * width, heads[1] * width)

    def head_vector(part: str) -> torch.Tensor:
        return load_head_vector(loader, f"{name}.{part}", config.num_heads, heads)

    return Mamba2(
        layer=layer,
        config=config,
        projection=_load_projection(context, layout, name),
        convolution=load_convolution(
            loader,
            f"{name}.conv1d",
            values + 2 * config.num_key_heads * config.key_dim,
            config.conv_kernel,
            _channel_spans(layout, rank),
            has_bias=config.has_conv_bias,
        ),
        key_index=torch.tensor(layout.key_index(rank), device=loader.device),
        decay_rate=head_vector("A_log").exp(),
        step_bias=head_vector("dt_bias"),
        skip=head_vector("D"),
        norm=load_head_group_norm(
            loader, context.shard, layout, f"{name}.norm", context.config.rms_norm_eps
        ),
        output=load_rows(
            loader,
            context.shard,
            f"{name}.out_proj",
            hidden_size,
            values,
            value_span,
            has_bias=config.has_projection_bias,
        ),
    )


def _channel_spans(layout: RecurrentLayout, rank: int) -> list[Span]:
    """A rank's channels of the convolution: x of its heads, then B and C of their groups."""
    config, (first, last) = layout.config, layout.head_range(rank)
    values = config.num_heads * config.value_dim
    start, end = (group * config.key_dim for group in layout.key_range(rank))
    total = config.num_key_heads * config.key_dim
    return [
        (first * config.value_dim, last * config.value_dim),
        (values + start, values + end),
        (values + total + start, values + total + end),
    ]


def _load_projection(context: BuildContext, layout: RecurrentLayout, name: str) -> Linear:
    config, (first, last) = layout.config, layout.head_range(context.shard.rank)
    values = config.num_heads * config.value_dim
    channels = values + 2 * config.num_key_heads * config.key_dim
    own = _channel_spans(layout, context.shard.rank)
    spans = [
        own[0],  # z has the order of x
        *((values + start, values + end) for start, end in own),
        (values + channels + first, values + channels + last),
    ]
    size = values + channels + config.num_heads
    shape = (size, context.config.hidden_size)
    weight = load_spans(context.loader, f"{name}.in_proj.weight", shape, spans)
    bias = None
    if config.has_projection_bias:
        bias = load_spans(context.loader, f"{name}.in_proj.bias", (size,), spans)
    return Linear.of(weight, bias, loader=context.loader)
