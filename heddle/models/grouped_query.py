"""The projections around grouped-query attention, with the options that families choose among.

    query, key, value = split(x @ W + b)
    query, key        = norm?(query, key), turned by position, plain norm?
    query             = query * temperature(position)?
    out               = attention(query, key, value, sinks?) @ W_o + b_o

Legend: `M` rows, `h` query-head lanes that this rank projects, `Ks` kv heads of its slice, `D` head
width, `E` hidden size.

Source: Llama 3 (arXiv 2407.21783), Qwen3 (arXiv 2505.09388), Gemma 3 (arXiv 2503.19786), the
gpt-oss and Llama 4 model code; temperature, arXiv 2501.19399.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from heddle.attention.base import StepOps
from heddle.config.model import TemperatureConfig
from heddle.kernels.registry import Kernels, create_kernels
from heddle.kernels.rms_norm.reference import plain_norm
from heddle.kernels.rotate.reference import HeadNorm
from heddle.models.base import BuildContext
from heddle.models.blocks import load_head_output
from heddle.models.decoder import LoadNorm, load_rms_norm
from heddle.models.layers.linear import ColumnPart, Linear, load_columns
from heddle.models.layers.norm import RMSNorm
from heddle.models.layers.rotary import Turn
from heddle.models.weights.source import Span
from heddle.models.width_norm import WidthNorm, load_width_norm


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Projections of one layer. Query, key and value come from one product."""

    layer: int
    query_key_value: Linear
    output: Linear
    head_norm: Callable[[torch.Tensor], torch.Tensor] | None
    """Of query and key heads, before the rotation: `[M, h + Ks, D]` -> the same shape."""
    num_lanes: int
    num_own_heads: int
    num_kv_heads: int
    head_dim: int
    plain_norm_eps: float | None = None
    """Of the norm behind the rotation; None: there is none."""
    temperature: TemperatureConfig | None = None
    sinks: torch.Tensor | None = None  # [h]
    kernels: Kernels = field(default_factory=partial(create_kernels, "torch"))

    def __call__(self, x: torch.Tensor, rotation: Turn, ops: StepOps) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        rotated = self.num_lanes + self.num_kv_heads
        heads = self.query_key_value(x, ops)
        heads = heads.view(len(x), rotated + self.num_kv_heads, self.head_dim)
        query, key, value = self._turned(heads, rotation)
        if self.temperature is not None:
            query = query * query_factors(self.temperature, rotation.positions, x.dtype)
        mixed = ops.gqa(self.layer, query, key, value, self.sinks)
        return self.output(mixed[:, : self.num_own_heads].flatten(1), ops)

    def _turned(
        self, heads: torch.Tensor, rotation: Turn
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value; norm, rotation, norm of the first two, as far as this layer has
        them.
        """
        norm, turns = self.head_norm, rotation.turns
        is_usual = norm is None or isinstance(norm, RMSNorm)
        if turns is not None and is_usual and self.plain_norm_eps is None:
            weighed = HeadNorm(norm.weight, norm.eps) if isinstance(norm, RMSNorm) else None
            query, rows = self.kernels.rotate(heads, self.num_lanes, turns, weighed)
            return query, rows[..., : self.head_dim], rows[..., self.head_dim :]
        met = heads[:, : self.num_lanes + self.num_kv_heads]
        turned = rotation(met if norm is None else norm(met))
        if self.plain_norm_eps is not None:
            turned = plain_norm(turned, self.plain_norm_eps)
        value = heads[:, self.num_lanes + self.num_kv_heads :]
        return turned[:, : self.num_lanes], turned[:, self.num_lanes :], value


def query_factors(
    config: TemperatureConfig, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`[M]` positions -> `[M, 1, 1]` factors of the queries there, in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    steps = ((positions + 1).to(wide) / config.floor).floor()
    return (steps.log1p() * config.scale + 1.0).to(dtype)[:, None, None]


def load_grouped_query(
    context: BuildContext,
    layer: int,
    name: str,
    load_norm: LoadNorm | None = None,
    fused: str | None = None,
) -> GroupedQueryAttention:
    """Load the block called `name`; its options are in the configuration.

    Args:
        context: model, place and loader.
        layer: index of the layer.
        name: of the block's tensors.
        load_norm: of the head norms; None: `load_rms_norm`.
        fused: what the checkpoint calls one matrix of query, key, then value; None: it has three.
    """
    config = context.config
    (first, last), (first_kv, last_kv) = context.query_range, context.kv_range
    width, num_kv_heads = config.head_dim, last_kv - first_kv
    is_rotated = config.kind_of(layer).rope != "none"
    return GroupedQueryAttention(
        layer=layer,
        query_key_value=_load_query_key_value(context, name, fused),
        output=load_head_output(context, name),
        head_norm=_load_head_norm(context, name, load_norm),
        num_lanes=context.num_projected_lanes,
        num_own_heads=last - first,
        num_kv_heads=num_kv_heads,
        head_dim=width,
        plain_norm_eps=config.rms_norm_eps if config.qk_l2_norm and is_rotated else None,
        temperature=None if is_rotated else config.temperature,
        sinks=_load_sinks(context, name) if config.has_sinks else None,
        kernels=context.loader.kernels,
    )


def _load_query_key_value(context: BuildContext, name: str, fused: str | None) -> Linear:
    config, width = context.config, context.config.head_dim
    num_queries, num_keys = config.num_query_heads, config.num_kv_heads
    keys = context.kv_range
    room = keys[1] - keys[0]

    def part(side: str, start: int, count: int, spans: Sequence[Span], room: int) -> ColumnPart:
        """Heads of one side, which start at head `start` of the fused matrix."""
        matrix, first = (f"{side}_proj", 0) if fused is None else (fused, start)
        size = count if fused is None else num_queries + 2 * num_keys
        own, *more = [((first + i) * width, (first + j) * width) for i, j in spans]
        return ColumnPart(
            f"{name}.{matrix}", size * width, own, room * width, config.qkv_bias, tuple(more)
        )

    parts = [
        part("q", 0, num_queries, context.projected_ranges, context.heads.lanes),
        part("k", num_queries, num_keys, [keys], room),
        part("v", num_queries + num_keys, num_keys, [keys], room),
    ]
    return load_columns(context.loader, parts, config.hidden_size)


def _load_head_norm(
    context: BuildContext, name: str, load_norm: LoadNorm | None
) -> RMSNorm | WidthNorm | None:
    """One norm for the fused heads: the query weight per lane, then the key weight per kv head."""
    if context.config.qk_width_norm:
        return load_width_norm(context, name)
    if not context.config.qk_norm:
        return None
    first_kv, last_kv = context.kv_range
    load = load_norm or load_rms_norm(context)
    query, key = (load(f"{name}.{side}_norm", context.config.head_dim) for side in ("q", "k"))
    rows = [
        query.weight.expand(context.num_projected_lanes, -1),
        key.weight.expand(last_kv - first_kv, -1),
    ]
    return RMSNorm(torch.cat(rows), query.eps, context.loader.kernels)


def _load_sinks(context: BuildContext, name: str) -> torch.Tensor:
    """`[h]`: logits of own heads; pad lanes have zeros, which nobody reads."""
    first, last = context.query_range
    shape = (context.config.num_query_heads,)
    context.loader.check(f"{name}.sinks", shape)
    sinks = context.loader.zeros(context.heads.lanes)
    context.loader.fill(sinks[: last - first], f"{name}.sinks", shape, (first, last))
    return sinks
