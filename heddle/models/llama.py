"""Llama and its near relatives: dense models, and mixtures however a checkpoint stores them.

What differs between the members is in the configuration (biases, norms, windows, sinks), in the
dtype of the norms, and in how a checkpoint names and stores its experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from heddle.models.base import BuildContext
from heddle.models.blocks import load_feed_forward
from heddle.models.decoder import (
    LLAMA_NAMES,
    Decoder,
    LayerNames,
    LoadNorm,
    load_decoder,
)
from heddle.models.grouped_query import GroupedQueryAttention, load_grouped_query
from heddle.models.layers.experts import FusedExperts, SeparateExperts
from heddle.models.layers.moe import DEEPSEEK_NAMES, QWEN_NAMES, MoENames
from heddle.models.layers.norm import RMSNorm

MIXTRAL_LAYER = LayerNames(feed_forward="block_sparse_moe")
MIXTRAL_NAMES = MoENames(storage=SeparateExperts(gate="w1", up="w3", down="w2"))
MINIMAX_M2_NAMES = replace(MIXTRAL_NAMES, correction="e_score_correction_bias")
GPT_OSS_NAMES = MoENames(router="router", storage=FusedExperts(interleaved=True))


def load_llama(context: BuildContext) -> Decoder:
    """Load a dense model, or a mixture as Qwen stores it."""
    return load_family(context)


def load_mixtral(context: BuildContext) -> Decoder:
    """Load a mixture as Mixtral stores it."""
    return load_family(context, names=MIXTRAL_LAYER, moe_names=MIXTRAL_NAMES)


def load_gpt_oss(context: BuildContext) -> Decoder:
    """Load a gpt-oss model; its norms are computed in float32."""
    return load_family(context, moe_names=GPT_OSS_NAMES, load_norm=load_wide_norm(context))


def load_minimax_m2(context: BuildContext) -> Decoder:
    """Load a MiniMax-M2 model."""
    return load_family(context, names=MIXTRAL_LAYER, moe_names=MINIMAX_M2_NAMES)


def load_glm_moe(context: BuildContext) -> Decoder:
    """Load a GLM mixture, stored as DeepSeek stores it."""
    return load_family(context, moe_names=DEEPSEEK_NAMES)


def load_family(
    context: BuildContext,
    *,
    names: LayerNames = LLAMA_NAMES,
    moe_names: MoENames = QWEN_NAMES,
    load_norm: LoadNorm | None = None,
) -> Decoder:
    """Load a decoder of grouped-query attention and dense or sparse feed-forward blocks."""

    def load_attention(layer: int, name: str) -> GroupedQueryAttention:
        return load_grouped_query(context, layer, name, load_norm, names.query_key_value)

    return load_decoder(
        context,
        rotary_width=context.config.rotary_dim or context.config.head_dim,
        load_attention=load_attention,
        load_feed_forward=partial(
            load_feed_forward, context, moe_names=moe_names, fused=names.gate_up
        ),
        load_norm=load_norm,
        names=names,
    )


def load_wide_norm(context: BuildContext, offset: float = 0.0) -> LoadNorm:
    """Norms that are computed in float32 or wider and rounded once.

    Args:
        context: model and loader.
        offset: added to the stored weights (Gemma stores them around zero).
    """
    wide = torch.promote_types(context.loader.dtype, torch.float32)

    def load(name: str, width: int) -> RMSNorm:
        weight = context.loader.load(f"{name}.weight", (width,), dtype=wide)
        return RMSNorm(weight + offset, context.config.rms_norm_eps, context.loader.kernels)

    return load
