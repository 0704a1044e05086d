"""Shapes and constants of gpt-oss: sinks, alternating windows, biased experts."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ModelConfig, MoEConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_experts import read_mixtral_moe
from heddle.models.config_fields import Fields
from heddle.models.config_layers import FULL, SLIDING, read_window_kinds
from heddle.models.config_rope import read_rope

_HEAD_DIM, _THETA = 64, 150000.0
_ALPHA, _LIMIT = 1.702, 7.0


def read_gpt_oss_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a gpt-oss model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        # Public readers of these files disagree on what an absent section means.
        raise fields.wrong("rope_scaling", "the section is required in this family")
    rope = read_rope(fields, interleaved=False, default_theta=_THETA)
    base = read_base(fields, architecture, eos, rope, default_head_dim=_HEAD_DIM)
    attention_bias = fields.boolean("attention_bias", True)
    return replace(
        base,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        has_sinks=True,
        layer_kinds=read_window_kinds(
            fields, base.num_layers, lambda layer: FULL if layer % 2 else SLIDING
        ),
        moe=_read_moe(fields, base.intermediate_size),
    )


def _read_moe(fields: Fields, inner: int) -> MoEConfig:
    return replace(
        read_mixtral_moe(fields, inner),
        chooses_by_logits=True,
        has_router_bias=True,
        has_expert_bias=True,
        swiglu_alpha=fields.number("swiglu_alpha", _ALPHA),
        swiglu_limit=fields.number("swiglu_limit", _LIMIT),
    )
