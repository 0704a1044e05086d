"""Llama and its near relatives: Mistral, Qwen2 (biases), Qwen3 (a norm over each head).

Legend: `M` rows, `h` query-head lanes, `Ks` kv heads of this rank's slice, `D` head width, `E`
hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.attention.base import StepAttention
from heddle.models.base import BuildContext
from heddle.models.decoder import Decoder, load_decoder
from heddle.models.layers.linear import ColumnPart, Linear, load_columns, load_rows
from heddle.models.layers.mlp import MLP, load_mlp
from heddle.models.layers.norm import RMSNorm
from heddle.models.layers.rotary import Rotation


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Projections of one layer. Query, key and value come from one product."""

    layer: int
    query_key_value: Linear
    output: Linear
    head_norm: RMSNorm | None
    num_lanes: int
    num_own_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, attention: StepAttention
    ) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        lanes, rotated = self.num_lanes, self.num_lanes + self.num_kv_heads
        heads = self.query_key_value(x).view(len(x), rotated + self.num_kv_heads, self.head_dim)
        turned, value = heads[:, :rotated], heads[:, rotated:]
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        turned = rotation(turned)
        mixed = attention.gqa(self.layer, turned[:, :lanes], turned[:, lanes:], value)
        return self.output(mixed[:, : self.num_own_heads].flatten(1))


def load_llama(context: BuildContext) -> Decoder:
    """Load a model of this family; what differs between its members is in the configuration."""
    config = context.config

    def load_attention(layer: int, name: str) -> GroupedQueryAttention:
        return _load_attention(context, layer, name)

    def load_feed_forward(_: int, name: str) -> MLP:
        return load_mlp(
            context.loader,
            context.shard,
            name,
            config.hidden_size,
            config.intermediate_size,
            has_bias=config.mlp_bias,
        )

    return load_decoder(
        context,
        rotary_width=config.head_dim,
        load_attention=load_attention,
        load_feed_forward=load_feed_forward,
    )


def _load_attention(context: BuildContext, layer: int, name: str) -> GroupedQueryAttention:
    config, width = context.config, context.config.head_dim
    lanes, (first, last), (first_kv, last_kv) = (
        context.heads.lanes,
        context.query_range,
        context.kv_range,
    )
    num_kv_heads = last_kv - first_kv

    def part(side: str, num_heads: int, start: int, end: int, room: int) -> ColumnPart:
        span = (start * width, end * width)
        return ColumnPart(
            f"{name}.{side}_proj", num_heads * width, span, room * width, config.qkv_bias
        )

    parts = [
        part("q", config.num_query_heads, first, last, lanes),
        part("k", config.num_kv_heads, first_kv, last_kv, num_kv_heads),
        part("v", config.num_kv_heads, first_kv, last_kv, num_kv_heads),
    ]
    return GroupedQueryAttention(
        layer=layer,
        query_key_value=load_columns(context.loader, parts, config.hidden_size),
        output=load_rows(
            context.loader,
            context.shard,
            f"{name}.o_proj",
            config.hidden_size,
            config.num_query_heads * width,
            (first * width, last * width),
            has_bias=config.output_bias,
        ),
        head_norm=_load_head_norm(context, name, num_kv_heads) if config.qk_norm else None,
        num_lanes=lanes,
        num_own_heads=last - first,
        num_kv_heads=num_kv_heads,
        head_dim=width,
    )


def _load_head_norm(context: BuildContext, name: str, num_kv_heads: int) -> RMSNorm:
    """One norm for the fused heads: the query weight per lane, then the key weight per kv head."""
    query, key = (
        context.loader.load(f"{name}.{side}_norm.weight", (context.config.head_dim,))
        for side in ("q", "k")
    )
    rows = [query.expand(context.heads.lanes, -1), key.expand(num_kv_heads, -1)]
    return RMSNorm(torch.cat(rows), context.config.rms_norm_eps)
