"""Shapes and constants of OLMo 3: OLMo 2 with windows, whose layers keep the plain rotary table."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ModelConfig, RopeConfig
from heddle.models.config_fields import Fields
from heddle.models.config_layers import FULL, SLIDING, read_window_kinds
from heddle.models.config_olmo2 import read_olmo
from heddle.models.config_rope import read_layer_ropes, read_rope

_THETA = 5e5
_PATTERN = 4  # every fourth layer is full


def read_olmo3_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model.

    new   {"rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}}
    old   {"rope_theta": 5e5, "rope_scaling": {...}}    scaling is of full layers alone

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    if "rope_parameters" in fields:
        full, local = read_layer_ropes(fields, _THETA, _THETA)
    else:
        full = read_rope(fields, interleaved=False, default_theta=_THETA)
        local = RopeConfig(theta=full.theta)
    base = read_olmo(fields, architecture, eos, full)
    kinds = read_window_kinds(
        fields,
        base.num_layers,
        lambda layer: SLIDING if (layer + 1) % _PATTERN else FULL,
        rope="local",
    )
    return replace(base, local_rope=local, layer_kinds=kinds)
