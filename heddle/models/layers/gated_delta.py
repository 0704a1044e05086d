"""The gated delta layer of Qwen3-Next.

    q, k, v, z, b, a = x @ W                    z gate, b and a one number per head
    q, k, v          = silu(convolution)
    q, k             = unit length, q over sqrt(K); a key head serves several value heads
    log decay        = -exp(A) * softplus(a + bias),   beta = sigmoid(b)
    out              = (norm(recurrence) * silu(z)) @ W_o

Legend: `M` rows, `h` heads of this rank that hold a state, `r` of them per key head in the model,
`K` and `V` key and value width, `E` hidden size.

Source: arXiv 2412.06464 and the Qwen3-Next model code.
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
from heddle.models.layers.linear import Linear, load_rows
from heddle.models.layers.norm import RMSNorm
from heddle.models.layers.recurrent_weights import load_convolution, load_head_vector, load_spans
from heddle.models.layers.rotary import Turn
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.source import Span

_UNIT_EPS = 1e-6  # of the published model code


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Projections around one layer's recurrence. All inputs come from one product."""

    layer: int
    config: RecurrentConfig
    projection: Linear
    """Channels of the convolution (q, k, v), then z, then b, then a."""
    convolution: Convolution
    key_index: torch.Tensor  # [h] int64: key head of each head
    decay_rate: torch.Tensor  # [h], exp(A)
    decay_bias: torch.Tensor  # [h]
    norm: RMSNorm
    output: Linear

    def __call__(self, x: torch.Tensor, rotation: Turn, ops: StepOps) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        del rotation  # order is in the recurrence itself
        heads, width = len(self.key_index), self.config.value_dim
        channels, z, b, a = torch.split(
            self.projection(x),
            [self.convolution.weight.shape[1], heads * width, heads, heads],
            dim=-1,
        )

        def terms(convolved: torch.Tensor) -> Terms:
            return self._terms(convolved, b, a)

        mixed = ops.recurrent(self.layer, RecurrentInputs(channels, self.convolution, terms))
        gate = functional.silu(z.to(mixed.dtype)).view(mixed.shape)
        return self.output(self.norm(mixed).mul_(gate).flatten(1).to(x.dtype), ops)

    def _terms(self, convolved: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Terms:
        dtype, key_dim = self.decay_rate.dtype, self.config.key_dim
        values = len(self.key_index) * self.config.value_dim
        keys = (convolved.shape[1] - values) // 2
        query, key, value = torch.split(convolved.to(dtype), [keys, keys, values], dim=-1)
        query, key = (
            _unit(part.reshape(len(part), keys // key_dim, key_dim)) for part in (query, key)
        )
        softened = functional.softplus(a.to(dtype) + self.decay_bias)
        return Terms(
            query=query[:, self.key_index] * key_dim**-0.5,
            key=key[:, self.key_index],
            value=value.reshape(len(value), len(self.key_index), self.config.value_dim),
            log_decay=-self.decay_rate * softened,
            beta=b.to(dtype).sigmoid(),
        )


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of unit length."""
    return x * (x.square().sum(-1, keepdim=True) + _UNIT_EPS).rsqrt()


def load_gated_delta(
    context: BuildContext, layout: RecurrentLayout, layer: int, name: str
) -> GatedDelta:
    """Load a rank's heads of the layer called `name`."""
    config, loader, rank = layout.config, context.loader, context.shard.rank
    heads, width = layout.head_range(rank), config.value_dim
    value_span = (heads[0] * width, heads[1] * width)
    wide = torch.promote_types(loader.dtype, torch.float32)
    norm = loader.load(f"{name}.norm.weight", (width,), dtype=wide)
    key_total = config.num_key_heads * config.key_dim
    first_key, last_key = (key * config.key_dim for key in layout.key_range(rank))
    rate = load_head_vector(loader, f"{name}.A_log", config.num_heads, heads).exp()
    return GatedDelta(
        layer=layer,
        config=config,
        projection=_load_projection(loader, layout, rank, name, context.config.hidden_size),
        convolution=load_convolution(
            loader,
            f"{name}.conv1d",
            2 * key_total + config.num_heads * width,
            config.conv_kernel,
            [
                (first_key, last_key),
                (key_total + first_key, key_total + last_key),
                (2 * key_total + value_span[0], 2 * key_total + value_span[1]),
            ],
        ),
        key_index=torch.tensor(layout.key_index(rank), device=loader.device),
        decay_rate=rate,
        decay_bias=load_head_vector(loader, f"{name}.dt_bias", config.num_heads, heads),
        norm=RMSNorm(norm, context.config.rms_norm_eps, loader.kernels),
        output=load_rows(
            loader,
            context.shard,
            f"{name}.out_proj",
            context.config.hidden_size,
            config.num_heads * width,
            value_span,
        ),
    )


def _load_projection(
    loader: WeightLoader, layout: RecurrentLayout, rank: int, name: str, hidden_size: int
) -> Linear:
    """Two matrices, each ordered by key head, become one that is ordered by part.

    Of key head j the first holds `q K | k K | v r*V | z r*V`, the second `b r | a r`.
    """
    config = layout.config
    ratio, width = config.num_heads // config.num_key_heads, config.value_dim
    size = 2 * config.key_dim + 2 * ratio * width
    keys, heads = range(*layout.key_range(rank)), range(*layout.head_range(rank))

    def key_span(offset: int) -> list[Span]:
        return [(k * size + offset, k * size + offset + config.key_dim) for k in keys]

    def head_span(start: int, group: int, unit: int) -> list[Span]:
        starts = (head // ratio * group + start + head % ratio * unit for head in heads)
        return [(first, first + unit) for first in starts]

    values = 2 * config.key_dim
    mixed = load_spans(
        loader,
        f"{name}.in_proj_qkvz.weight",
        (config.num_key_heads * size, hidden_size),
        [
            *key_span(0),
            *key_span(config.key_dim),
            *head_span(values, size, width),
            *head_span(values + ratio * width, size, width),
        ],
    )
    scalars = load_spans(
        loader,
        f"{name}.in_proj_ba.weight",
        (2 * config.num_heads, hidden_size),
        [*head_span(0, 2 * ratio, 1), *head_span(ratio, 2 * ratio, 1)],
    )
    return Linear.of(torch.cat([mixed, scalars]), loader=loader)
