"""Shapes and constants of EXAONE 4: layers with a window rotate, full ones between them do not."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import LayerKind, ModelConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_layers import FULL, SLIDING, read_window_kinds
from heddle.models.config_rope import read_rope

_PATTERN = 4  # every fourth layer is full


def read_exaone4_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model; one without windows rotates everywhere.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    base = read_base(fields, architecture, eos, read_rope(fields, interleaved=False))
    return replace(base, qk_norm=True, layer_kinds=_read_kinds(fields, base.num_layers))


def _read_kinds(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    if "sliding_window" not in fields:
        return ()
    listed = "layer_types" in fields  # a pattern may then be a word
    pattern = _PATTERN if listed else fields.integer("sliding_window_pattern", _PATTERN)
    kinds = read_window_kinds(
        fields, num_layers, lambda layer: SLIDING if (layer + 1) % pattern else FULL
    )
    nope = LayerKind(rope="none")
    return tuple(nope if kind == LayerKind() else kind for kind in kinds) or (nope,) * num_layers
