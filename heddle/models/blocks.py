"""Parts of a layer that families load alike, from the configuration and a name alone.

Legend: `E` hidden size, `H` query heads, `Dv` width of a head as it leaves attention.
"""

from __future__ import annotations

from heddle.models.base import BuildContext
from heddle.models.decoder import FeedForwardBlock
from heddle.models.layers.activation import activation_of
from heddle.models.layers.linear import Linear, load_rows
from heddle.models.layers.mlp import load_mlp
from heddle.models.layers.moe import DEEPSEEK_NAMES, MoENames, load_moe


def load_feed_forward(
    context: BuildContext,
    layer: int,
    name: str,
    moe_names: MoENames = DEEPSEEK_NAMES,
    fused: str | None = None,
) -> FeedForwardBlock:
    """A mixture where the model has one in this layer, else a dense block.

    Args:
        context: model, place and loader.
        layer: index of the layer.
        name: of the block's tensors.
        moe_names: how a checkpoint names and stores its experts.
        fused: what it calls gate and up of a dense block in one; None: they are two.
    """
    config, loader, shard = context.config, context.loader, context.shard
    if config.moe is not None and config.moe.has_experts(layer):
        return load_moe(loader, shard, name, config.hidden_size, config.moe, moe_names)
    return load_mlp(
        loader,
        shard,
        name,
        config.hidden_size,
        config.intermediate_size,
        has_bias=config.mlp_bias,
        activation=activation_of(config.activation, loader.kernels),
        fused=fused,
    )


def load_head_output(context: BuildContext, name: str) -> Linear:
    """The output projection `[H * Dv, E]` of an attention block: the inputs of this rank's heads.

    Args:
        context: model, place and loader.
        name: of the attention block's tensors.
    """
    config, width = context.config, context.config.output_head_dim
    first, last = context.query_range
    return load_rows(
        context.loader,
        context.shard,
        f"{name}.o_proj",
        config.hidden_size,
        config.num_query_heads * width,
        (first * width, last * width),
        has_bias=config.output_bias,
    )
