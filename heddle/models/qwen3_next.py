"""Qwen3-Next: gated delta layers, gated attention in every few layers, experts.

Norm weights are stored around zero, except those behind a recurrence. A quarter of each head is
rotated.

Source: the Qwen3-Next model code.
"""

from __future__ import annotations

from functools import partial

from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.models.base import BuildContext
from heddle.models.blocks import load_feed_forward
from heddle.models.decoder import (
    AttentionBlock,
    Decoder,
    LayerNames,
    load_decoder,
)
from heddle.models.gated_attention import load_gated_attention
from heddle.models.layers.gated_delta import load_gated_delta
from heddle.models.layers.moe import QWEN_NAMES
from heddle.models.llama import load_wide_norm

_ATTENTION, _RECURRENT = LayerNames(), LayerNames(attention="linear_attn")


def load_qwen3_next(context: BuildContext) -> Decoder:
    """Load a model of this family."""
    config = context.config
    assert config.recurrent is not None, "set by the config reader"
    assert config.rotary_dim is not None, "set by the config reader"
    layout = RecurrentLayout(config.recurrent, context.shard.size)
    load_norm = load_wide_norm(context, offset=1.0)

    def load_mixer(layer: int, name: str) -> AttentionBlock:
        if config.kind_of(layer).mixer == "recurrent":
            return load_gated_delta(context, layout, layer, name)
        return load_gated_attention(context, layer, name, load_norm)

    def names(layer: int) -> LayerNames:
        return _RECURRENT if config.kind_of(layer).mixer == "recurrent" else _ATTENTION

    return load_decoder(
        context,
        rotary_width=config.rotary_dim,
        load_attention=load_mixer,
        load_feed_forward=partial(load_feed_forward, context, moe_names=QWEN_NAMES),
        load_norm=load_norm,
        names=names,
    )
