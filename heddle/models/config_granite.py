"""Shapes and constants of Granite 3 and 4 (dense): Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import Factors, ModelConfig, ResidualFactors
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_rope import read_rope


def read_granite_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    attention_bias = fields.boolean("attention_bias", False)
    factors = Factors(block=fields.number("residual_multiplier", 1.0))
    return replace(
        read_base(fields, architecture, eos, read_rope(fields, interleaved=False)),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_factors=ResidualFactors(attention=factors, feed_forward=factors),
        logits_scale=1.0 / fields.number("logits_scaling", 1.0),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )
