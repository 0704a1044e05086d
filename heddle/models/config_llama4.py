"""Shapes and constants of Llama 4 (text)."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import LayerKind, ModelConfig, MoEConfig, TemperatureConfig
from heddle.config.visibility import Visibility
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_experts import read_expert_counts
from heddle.models.config_fields import Fields
from heddle.models.config_layers import CHUNKED, FULL, read_layer_types, read_rotating_layers
from heddle.models.config_rope import read_rope

_HEAD_DIM, _THETA = 128, 500000.0
_CHUNK = 8192
_NOPE_INTERVAL = 4  # every fourth layer does not rotate


def read_llama4_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a Llama 4 text model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=True, default_theta=_THETA)
    base = read_base(fields, architecture, eos, rope, default_head_dim=_HEAD_DIM)
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        base,
        intermediate_size=fields.integer("intermediate_size_mlp"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_l2_norm=fields.boolean("use_qk_norm", True),
        temperature=_read_temperature(fields),
        layer_kinds=_read_kinds(fields, base.num_layers),
        moe=_read_moe(fields, base.num_layers),
    )


def _read_temperature(fields: Fields) -> TemperatureConfig | None:
    if not fields.boolean("attn_temperature_tuning", True):
        return None
    return TemperatureConfig(
        floor=fields.integer("floor_scale", 8192), scale=fields.number("attn_scale", 0.1)
    )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """Rotated layers see their chunk, the others everything, unless the file lists types."""
    rotates = read_rotating_layers(fields, num_layers, _NOPE_INTERVAL)
    types = read_layer_types(
        fields, num_layers, (FULL, CHUNKED), lambda layer: CHUNKED if rotates[layer] else FULL
    )
    chunk = Visibility("chunk", fields.integer("attention_chunk_size", _CHUNK))
    return tuple(
        LayerKind(
            visibility=chunk if type_ == CHUNKED else Visibility(),
            rope="global" if rotated else "none",
        )
        for type_, rotated in zip(types, rotates, strict=True)
    )


def _read_moe(fields: Fields, num_layers: int) -> MoEConfig:
    num_experts, per_token = read_expert_counts(fields, "num_local_experts")
    step, inner = (
        fields.integer("interleave_moe_layer_step", 1),
        fields.integer("intermediate_size"),
    )
    sparse = range(step - 1, num_layers, step)
    listed = fields.integers("moe_layers") if "moe_layers" in fields else tuple(sparse)
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        expert_intermediate_size=inner,
        shared_intermediate_size=inner,
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in listed),
        scoring="sigmoid",
        normalize_top_k=False,
        chooses_by_logits=True,
        scales_input=True,
    )
