"""Shapes and constants of GLM-4 (dense), of both generations."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ModelConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_rope import read_rope, read_rotary_dim

_HEAD_DIM, _ROTARY_SHARE = 128, 0.5


def read_glm4_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model: half of each head is rotated, in pairs of neighbours.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=True, is_partial=True)
    base = read_base(fields, architecture, eos, rope, default_head_dim=_HEAD_DIM)
    return replace(
        base,
        rotary_dim=read_rotary_dim(fields, base.head_dim, _ROTARY_SHARE),
        qkv_bias=fields.boolean("attention_bias", architecture == "Glm4ForCausalLM"),
    )
