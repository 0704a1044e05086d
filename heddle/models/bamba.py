"""Bamba: Mamba-2 layers, grouped-query attention in a few, dense feed-forward blocks.

Half of each head is rotated.

Source: the Bamba model code.
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
from heddle.models.grouped_query import load_grouped_query
from heddle.models.layers.mamba2 import load_mamba2


def load_bamba(context: BuildContext) -> Decoder:
    """Load a model of this family."""
    config = context.config
    assert config.recurrent is not None, "set by the config reader"
    assert config.rotary_dim is not None, "set by the config reader"
    layout = RecurrentLayout(config.recurrent, context.shard.size)

    def load_mixer(layer: int, name: str) -> AttentionBlock:
        if config.kind_of(layer).mixer == "recurrent":
            return load_mamba2(context, layout, layer, name)
        return load_grouped_query(context, layer, name)

    def names(layer: int) -> LayerNames:
        return LayerNames(
            attention="mamba" if config.kind_of(layer).mixer == "recurrent" else "self_attn",
            feed_forward="feed_forward",
            feed_forward_norm="pre_ff_layernorm",
        )

    return load_decoder(
        context,
        rotary_width=config.rotary_dim,
        load_attention=load_mixer,
        load_feed_forward=partial(load_feed_forward, context),
        names=names,
        final_norm="model.final_layernorm",
    )
