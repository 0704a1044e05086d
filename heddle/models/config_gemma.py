"""Shapes and constants of Gemma 2 and Gemma 3 (text)."""

from __future__ import annotations

import math
from dataclasses import replace

from heddle.config.model import ModelConfig, RopeConfig
from heddle.models.config_common import read_base
from heddle.models.config_fields import Fields
from heddle.models.config_layers import FULL, SLIDING, read_window_kinds
from heddle.models.config_rope import read_layer_ropes, read_rope, read_rope_section

_HEAD_DIM = 256
_QUERY_SCALE = 256.0
_PATTERN = 6  # Gemma 3: every sixth layer is full
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4


def read_gemma2_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a Gemma 2 model: windows alternate with full layers; scores and logits are capped.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    base = _read_gemma(fields, architecture, eos, read_rope(fields, interleaved=False))
    kinds = read_window_kinds(fields, base.num_layers, lambda layer: FULL if layer % 2 else SLIDING)
    return replace(
        base, layer_kinds=kinds, attention_softcap=_softcap(fields, "attn_logit_softcapping")
    )


def read_gemma3_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a Gemma 3 text model: layers with a window turn by a rotary table of their own.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    if "attn_logit_softcapping" in fields:
        # The published model code has the setting and does not apply it.
        raise fields.unsupported("attn_logit_softcapping", "Gemma 3 scores are not capped (null)")
    full, local = _read_ropes(fields)
    base = _read_gemma(fields, architecture, eos, full)
    pattern = fields.integer("sliding_window_pattern", _PATTERN)
    kinds = read_window_kinds(
        fields,
        base.num_layers,
        lambda layer: SLIDING if (layer + 1) % pattern else FULL,
        rope="local",
    )
    return replace(base, layer_kinds=kinds, local_rope=local, qk_norm=True)


def _read_gemma(
    fields: Fields, architecture: str, eos: tuple[int, ...], rope: RopeConfig
) -> ModelConfig:
    key = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    if fields.text(key, "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise fields.unsupported(key, "known: gelu_pytorch_tanh")
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.unsupported("use_bidirectional_attention", "a decoder looks back only (false)")
    base = read_base(fields, architecture, eos, rope, default_head_dim=_HEAD_DIM, default_tied=True)
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        base,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(base.hidden_size),
        attention_scale=fields.number("query_pre_attn_scalar", _QUERY_SCALE) ** -0.5,
        final_softcap=_softcap(fields, "final_logit_softcapping"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )


def _softcap(fields: Fields, key: str) -> float:
    return fields.number(key) if key in fields else 0.0


def _read_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Tables of full layers and of windows.

    new   {"rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}}
    old   {"rope_theta": 1e6, "rope_scaling": {...}, "rope_local_base_freq": 1e4}
    """
    if "rope_parameters" in fields:
        return read_layer_ropes(fields, _GLOBAL_THETA, _LOCAL_THETA)
    full = read_rope(fields, interleaved=False, default_theta=_GLOBAL_THETA)
    local = read_rope_section(
        fields,
        Fields(fields.path, {}),
        fields,
        "rope_local_base_freq",
        default_theta=_LOCAL_THETA,
    )
    return full, local
