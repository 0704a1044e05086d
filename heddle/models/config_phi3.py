"""Shapes and constants of Phi-3, Phi-3.5 (dense) and Phi-4."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ModelConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_layers import uniform_window
from heddle.models.config_rope import read_rope, read_rotary_dim


def read_phi3_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model: one window for all layers, if any, and a part of each head rotated.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=False, is_partial=True)
    if rope.rope_type not in ("default", "longrope"):
        key = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
        raise fields.unsupported(key, "known in Phi-3: default, longrope")
    if rope.rope_type == "longrope" and "original_max_position_embeddings" not in fields:
        # Published code takes 4096 then, whatever the section says: too easy to get wrong.
        raise fields.wrong("original_max_position_embeddings", "longrope needs it at the top level")
    base = read_base(fields, architecture, eos, rope)
    window = fields.optional_integer("sliding_window")
    if window is not None and window >= base.max_position_embeddings:
        window = None  # files of long models state one that no sequence reaches
    return replace(
        base,
        rotary_dim=read_rotary_dim(fields, base.head_dim, 1.0),
        layer_kinds=uniform_window(base.num_layers, window),
    )
