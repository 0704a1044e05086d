"""Constants that stretched rotary contexts put on rotations and on the softmax.

Source: yarn, arXiv 2309.00071, eq. 22; longrope, arXiv 2402.13753; the DeepSeek-V2 and V3 model
code.
"""

from __future__ import annotations

import math

from heddle.config.model import ModelConfig, RopeConfig


def softmax_scale(config: ModelConfig) -> float:
    """Factor on query-key products before the softmax.

    `1 / sqrt(head_dim)` unless the model states another; latent attention with a scaled rotary
    multiplies by the square of `yarn_mscale` for `mscale_all_dim`.
    """
    scale = config.attention_scale or 1.0 / math.sqrt(config.head_dim)
    rope = config.rope
    if config.mla is None or rope.rope_type == "default" or not rope.mscale_all_dim:
        return scale
    return scale * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def attention_factor(rope: RopeConfig) -> float:
    """Factor on cosine and sine; yarn and longrope have one."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        return _longrope_factor(rope)
    if rope.mscale and rope.mscale_all_dim:
        top, bottom = (yarn_mscale(rope.factor, m) for m in (rope.mscale, rope.mscale_all_dim))
        return top / bottom
    return yarn_mscale(rope.factor, 1.0)


def _longrope_factor(rope: RopeConfig) -> float:
    window = rope.original_max_position_embeddings
    assert window is not None, "set by the config reader"
    return math.sqrt(1 + math.log(rope.factor) / math.log(window)) if rope.factor > 1 else 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """`0.1 * mscale * ln(factor) + 1` above a factor of 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
