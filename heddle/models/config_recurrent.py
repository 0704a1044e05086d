"""Shapes and constants of models in which most layers keep a state: Qwen3-Next, Bamba, MiniMax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from heddle.config.model import (
    ATTENTION,
    Factors,
    LayerKind,
    ModelConfig,
    RecurrentConfig,
    ResidualFactors,
)
from heddle.config.visibility import Visibility
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_experts import read_mixtral_moe, read_qwen_moe
from heddle.models.config_fields import Fields
from heddle.models.config_layers import FULL, read_layer_types
from heddle.models.config_rope import read_rope, read_rotary_dim

LINEAR = "linear_attention"
RECURRENT = LayerKind(mixer="recurrent", rope="none")

_QWEN_HEAD_DIM = 256
_QWEN_ROTARY_SHARE = 0.25
_QWEN_ATTENTION_INTERVAL = 4
_BAMBA_ROTARY_SHARE = 0.5  # of the published model code, whatever the file says
_BAMBA_CHUNK = 256
_MINIMAX_THETA = 1e6
_MINIMAX_CHUNK = 256


def read_qwen3_next_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a Qwen3-Next model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=False, is_partial=True)
    base = read_base(fields, architecture, eos, rope, default_head_dim=_QWEN_HEAD_DIM)
    interval = fields.integer("full_attention_interval", _QWEN_ATTENTION_INTERVAL)
    has_bias = fields.boolean("attention_bias", False)
    has_experts = fields.integer("num_experts", 1, minimum=0) > 0
    return replace(
        base,
        rotary_dim=read_rotary_dim(fields, base.head_dim, _QWEN_ROTARY_SHARE),
        qk_norm=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        layer_kinds=_layer_kinds(
            fields, base.num_layers, lambda layer: FULL if (layer + 1) % interval == 0 else LINEAR
        ),
        recurrent=_read_gated_delta(fields),
        moe=read_qwen_moe(fields, base.num_layers, has_shared=True) if has_experts else None,
    )


def _read_gated_delta(fields: Fields) -> RecurrentConfig:
    num_heads = fields.integer("linear_num_value_heads")
    num_key_heads = fields.integer("linear_num_key_heads")
    if num_heads % num_key_heads:
        raise fields.wrong(
            "linear_num_key_heads", f"it must divide linear_num_value_heads={num_heads}"
        )
    return RecurrentConfig(
        method="gated_delta",
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim", minimum=2),
        norm_groups=num_heads,
    )


def read_bamba_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a Bamba model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=False, is_partial=True)
    base = read_base(fields, architecture, eos, rope)
    attention = fields.integers("attn_layer_indices")
    has_bias = fields.boolean("attention_bias", False)
    rotary_dim = int(base.head_dim * _BAMBA_ROTARY_SHARE)
    if rotary_dim % 2:
        rule = f"a quarter of the head width {base.head_dim} must be a whole number, for pairs"
        raise fields.wrong("num_attention_heads", rule)
    return replace(
        base,
        rotary_dim=rotary_dim,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        layer_kinds=_kinds([layer not in attention for layer in range(base.num_layers)]),
        recurrent=_read_mamba2(fields, base.hidden_size),
    )


def _read_mamba2(fields: Fields, hidden_size: int) -> RecurrentConfig:
    inner = fields.integer("mamba_expand", 2) * hidden_size
    num_heads, num_groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups", 1)
    if inner % num_heads:
        raise fields.wrong("mamba_n_heads", f"it must divide the inner width {inner}")
    if num_heads % num_groups:
        raise fields.wrong("mamba_n_groups", f"it must divide mamba_n_heads={num_heads}")
    return RecurrentConfig(
        method="mamba2",
        num_heads=num_heads,
        num_key_heads=num_groups,
        key_dim=fields.integer("mamba_d_state"),
        value_dim=inner // num_heads,
        conv_kernel=fields.integer("mamba_d_conv", 4, minimum=2),
        chunk_size=fields.integer("mamba_chunk_size", _BAMBA_CHUNK),
        norm_groups=num_groups,
        has_conv_bias=fields.boolean("mamba_conv_bias", True),
        has_projection_bias=fields.boolean("mamba_proj_bias", False),
        time_step_limit=fields.number_pair("time_step_limit", (0.0, float("inf"))),
    )


def read_minimax_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a MiniMax-Text-01 model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=False, default_theta=_MINIMAX_THETA)
    base = read_base(fields, architecture, eos, rope)
    kinds = _layer_kinds(fields, base.num_layers, lambda layer: LINEAR if layer % 2 else FULL)
    window = fields.optional_integer("sliding_window")
    if window is not None:
        seen = LayerKind(visibility=Visibility("window", window))
        kinds = tuple(seen if kind is ATTENTION else kind for kind in kinds)
    return replace(
        base,
        layer_kinds=kinds,
        recurrent=RecurrentConfig(
            method="lightning",
            num_heads=base.num_query_heads,
            num_key_heads=base.num_query_heads,
            key_dim=base.head_dim,
            value_dim=base.head_dim,
            chunk_size=fields.integer("block_size", _MINIMAX_CHUNK),
            norm_groups=1,
        ),
        residual_factors=ResidualFactors(
            attention=_factors(fields, "full_attn"),
            recurrent=_factors(fields, "linear_attn"),
            feed_forward=_factors(fields, "mlp"),
        ),
        moe=read_mixtral_moe(fields, base.intermediate_size),
    )


def _factors(fields: Fields, block: str) -> Factors:
    return Factors(
        residual=fields.number(f"{block}_alpha_factor", 1.0),
        block=fields.number(f"{block}_beta_factor", 1.0),
    )


def _layer_kinds(
    fields: Fields, num_layers: int, default: Callable[[int], str]
) -> tuple[LayerKind, ...]:
    types = read_layer_types(fields, num_layers, (FULL, LINEAR), default)
    return _kinds([type_ == LINEAR for type_ in types])


def _kinds(is_recurrent: Sequence[bool]) -> tuple[LayerKind, ...]:
    return tuple(RECURRENT if flag else ATTENTION for flag in is_recurrent)
