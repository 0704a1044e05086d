"""Which layers see all keys and which see a window of them.

Newer files list a type per layer; older ones leave it to a rule of the family.

    "layer_types": ["sliding_attention", "full_attention", ...]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from heddle.config.model import ATTENTION, LayerKind
from heddle.config.visibility import Visibility
from heddle.models.config_fields import Fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def read_layer_types(
    fields: Fields, num_layers: int, legal: Sequence[str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """The type of each layer.

    Args:
        fields: the top level of `config.json`.
        num_layers: of the model.
        legal: types that the family can have.
        default: type of a layer where the file has no list.

    Raises:
        ModelFileError: the list has another length, or does not hold strings.
        UnsupportedError: a type that the family does not have.
    """
    if "layer_types" not in fields:
        return tuple(default(layer) for layer in range(num_layers))
    types = fields.strings("layer_types")
    if len(types) != num_layers:
        raise fields.wrong("layer_types", f"one per layer, num_hidden_layers={num_layers}")
    if unknown := sorted(set(types) - set(legal)):
        raise fields.unsupported(
            "layer_types", f"{unknown[0]} is not known here; known: {', '.join(legal)}"
        )
    return types


def read_window_kinds(
    fields: Fields,
    num_layers: int,
    default: Callable[[int], str],
    *,
    rope: Literal["global", "local"] = "global",
) -> tuple[LayerKind, ...]:
    """Kinds of layers of which some see `sliding_window` tokens.

    Args:
        fields: the top level of `config.json`.
        num_layers: of the model.
        default: type of a layer where the file has no list.
        rope: rotary table of the layers with a window.

    Returns:
        One kind per layer; empty when all see everything.

    Raises:
        ModelFileError: a layer needs a window and the file has none.
    """
    types = read_layer_types(fields, num_layers, (FULL, SLIDING), default)
    if SLIDING not in types:
        return ()
    window = LayerKind(visibility=Visibility("window", fields.integer("sliding_window")), rope=rope)
    return tuple(window if type_ == SLIDING else ATTENTION for type_ in types)


def read_rotating_layers(fields: Fields, num_layers: int, interval: int) -> tuple[int, ...]:
    """1 for layers that rotate, 0 for the others.

    Args:
        fields: the top level of `config.json`.
        num_layers: of the model.
        interval: of the family: the last of so many layers does not rotate.

    Raises:
        ModelFileError: the list is shorter than the model.
    """
    interval = fields.integer("no_rope_layer_interval", interval)
    # The key names layers without rotation; a 1 in its list means that the layer has one.
    rotates = fields.integers("no_rope_layers") or tuple(
        int((layer + 1) % interval != 0) for layer in range(num_layers)
    )
    if len(rotates) < num_layers:
        raise fields.wrong("no_rope_layers", f"one per layer, num_hidden_layers={num_layers}")
    return rotates[:num_layers]


def uniform_window(num_layers: int, window: int | None) -> tuple[LayerKind, ...]:
    """Every layer sees `window` tokens; None: everything."""
    if window is None:
        return ()
    return (LayerKind(visibility=Visibility("window", window)),) * num_layers
