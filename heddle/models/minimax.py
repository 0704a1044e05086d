"""MiniMax-Text-01: lightning attention, grouped-query attention in some layers, experts.

The residual stream is taken behind the norm, and both sides of each sum have a factor of their own:

    hidden = alpha * norm(hidden) + beta * block(norm(hidden))

Source: arXiv 2501.08313 and the MiniMax model code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.attention.base import StepOps
from heddle.config.model import Factors
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.models.base import BuildContext
from heddle.models.blocks import load_feed_forward
from heddle.models.decoder import (
    AttentionBlock,
    Decoder,
    DecoderLayer,
    FeedForwardBlock,
    load_layers,
    load_rms_norm,
)
from heddle.models.grouped_query import load_grouped_query
from heddle.models.layers.lightning import load_lightning
from heddle.models.layers.norm import RMSNorm
from heddle.models.layers.rotary import Turn
from heddle.models.layers.shard import Shard
from heddle.models.llama import MIXTRAL_NAMES


@dataclass(frozen=True, slots=True)
class ScaledLayer:
    """Two blocks whose residuals are taken behind the norm."""

    attention_norm: RMSNorm
    attention: AttentionBlock
    attention_factors: Factors
    feed_forward_norm: RMSNorm
    feed_forward: FeedForwardBlock
    feed_forward_factors: Factors

    def __call__(
        self, hidden: torch.Tensor, rotation: Turn, ops: StepOps, shard: Shard
    ) -> torch.Tensor:
        """`[M, E]` -> `[M, E]`."""
        ops.enter("projection")
        normed = self.attention_norm(hidden)
        mixed = shard.sum(self.attention(normed, rotation, ops))
        hidden = _weighed(normed, mixed, self.attention_factors)
        ops.enter("mlp")
        normed = self.feed_forward_norm(hidden)
        mixed = shard.sum(self.feed_forward(normed, ops))
        return _weighed(normed, mixed, self.feed_forward_factors)


def _weighed(normed: torch.Tensor, mixed: torch.Tensor, factors: Factors) -> torch.Tensor:
    # Norm and sum are fresh tensors of this rank, so both are changed in place.
    return normed.mul_(factors.residual).add_(mixed.mul_(factors.block))


def load_minimax(context: BuildContext) -> Decoder:
    """Load a model of this family."""
    config, width = context.config, context.config.hidden_size
    factors = config.residual_factors
    assert config.recurrent is not None, "set by the config reader"
    layout = RecurrentLayout(config.recurrent, context.shard.size)
    load_norm = load_rms_norm(context)

    def load_mixer(layer: int, name: str) -> AttentionBlock:
        if config.kind_of(layer).mixer == "recurrent":
            return load_lightning(context, layout, layer, name)
        return load_grouped_query(context, layer, name)

    def load_layer(layer: int, prefix: str) -> DecoderLayer:
        return ScaledLayer(
            attention_norm=load_norm(f"{prefix}.input_layernorm", width),
            attention=load_mixer(layer, f"{prefix}.self_attn"),
            attention_factors=(
                factors.recurrent
                if config.kind_of(layer).mixer == "recurrent"
                else factors.attention
            ),
            feed_forward_norm=load_norm(f"{prefix}.post_attention_layernorm", width),
            feed_forward=load_feed_forward(
                context, layer, f"{prefix}.block_sparse_moe", MIXTRAL_NAMES
            ),
            feed_forward_factors=factors.feed_forward,
        )

    return load_layers(
        context, rotary_width=config.head_dim, load_layer=load_layer, load_norm=load_norm
    )
