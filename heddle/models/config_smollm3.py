"""Shapes and constants of SmolLM3: Llama in which some layers do not rotate."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import LayerKind, ModelConfig
from heddle.config.visibility import FULL as EVERYTHING
from heddle.config.visibility import Visibility
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_layers import FULL, SLIDING, read_layer_types, read_rotating_layers
from heddle.models.config_rope import read_rope

_THETA = 2e6
_NOPE_INTERVAL = 4  # every fourth layer does not rotate


def read_smollm3_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=False, default_theta=_THETA)
    base = read_base(fields, architecture, eos, rope, default_tied=True)
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        base,
        layer_kinds=_read_kinds(fields, base.num_layers),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """Layers without rotation are those that may have a window."""
    rotates = read_rotating_layers(fields, num_layers, _NOPE_INTERVAL)
    has_window = fields.boolean("use_sliding_window", False) and "sliding_window" in fields
    types = read_layer_types(
        fields,
        num_layers,
        (FULL, SLIDING),
        lambda layer: SLIDING if has_window and not rotates[layer] else FULL,
    )
    window = (
        Visibility("window", fields.integer("sliding_window")) if SLIDING in types else EVERYTHING
    )
    return tuple(
        LayerKind(
            visibility=window if type_ == SLIDING else EVERYTHING,
            rope="global" if rotated else "none",
        )
        for type_, rotated in zip(types, rotates, strict=True)
    )
