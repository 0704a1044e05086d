"""Shapes and constants of GLM-4.5 to 4.7: grouped queries, a partial rotary, experts as in V3."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ModelConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_rope import read_rope, read_rotary_dim
from heddle.models.config_routing import RoutingDefaults, read_routed_experts

_ROTARY_SHARE = 0.5
_DEFAULTS = RoutingDefaults(num_groups=1, num_shared_experts=1, first_dense_layers=1)


def read_glm_moe_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a GLM mixture.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=False, is_partial=True)
    base = read_base(fields, architecture, eos, rope)
    return replace(
        base,
        rotary_dim=read_rotary_dim(fields, base.head_dim, _ROTARY_SHARE),
        qk_norm=fields.boolean("use_qk_norm", False),
        qkv_bias=fields.boolean("attention_bias", False),
        moe=read_routed_experts(fields, base.num_layers, _DEFAULTS, is_sigmoid=True),
    )
