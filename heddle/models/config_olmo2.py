"""Shapes and constants of OLMo 2."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ModelConfig, RopeConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_rope import read_rope


def read_olmo2_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    return read_olmo(fields, architecture, eos, read_rope(fields, interleaved=False))


def read_olmo(
    fields: Fields, architecture: str, eos: tuple[int, ...], rope: RopeConfig
) -> ModelConfig:
    """What OLMo 2 and 3 share: queries and keys are normed over their whole width.

    Raises: as `read_olmo2_config`.
    """
    require_silu(fields)
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        read_base(fields, architecture, eos, rope),
        qk_width_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
