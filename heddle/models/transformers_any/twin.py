"""A small model that computes by the same code as a large one.

A twin has few layers, heads and tokens, and small windows, so that a short text tries all that its
attention does. Its layers are chosen so that each kind of layer of the large model is among them;
`check_layers` sees to it, on shapes alone.

Legend: `L` layers, `H` query heads, `K` kv heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from heddle.errors import UnsupportedError

VOCABULARY = 61
HEAD_DIM = 40
"""A width that no model is published with: a softmax scale that follows from it is no constant."""
_MAX_LAYERS = 6
_LARGEST = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 44,
    "sliding_window": 5,
    "attention_chunk_size": 4,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 20,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
}
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def twin_config(config: Any) -> Any:
    """The configuration with few layers and small sizes."""
    names, data = config.attribute_map, config.to_dict()
    for name, largest in _LARGEST.items():
        key = names.get(name, name)
        if isinstance(data.get(key), int) and not isinstance(data[key], bool):
            data[key] = min(data[key], largest)
    num_heads, num_kv_heads = twin_heads(config.num_attention_heads, kv_heads(config))
    sizes = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_size": num_heads * HEAD_DIM,
        "word_embed_proj_dim": num_heads * HEAD_DIM,
    }
    for name, size in sizes.items():
        key = names.get(name, name)
        if data.get(key) is not None:
            data[key] = size
    data |= _SPECIAL_TOKENS
    return _with_layers(config, data, chosen_layers(config))


def kv_heads(config: Any) -> int:
    """`K`; a configuration that does not say has as many as query heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def twin_heads(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Few heads, with as many query heads per kv head as there are, up to three or four."""
    ratio = num_heads // num_kv_heads
    few = min(num_kv_heads, 4 if ratio == 1 else 2)
    return few * min(ratio, 4 if few == 1 else 3), few


def chosen_layers(config: Any) -> list[int]:
    """The first layers, and the first one of every further kind that the configuration lists."""
    count = config.num_hidden_layers
    lists = _layer_lists(config.to_dict(), count)
    chosen, seen = [], set()
    for layer in range(count):
        kind = tuple(str(values[layer]) for values in lists)
        if layer < (2 if lists else 4) or kind not in seen:
            chosen.append(layer)
        seen.add(kind)
    return chosen[:_MAX_LAYERS]


def _layer_lists(data: dict[str, Any], count: int) -> list[Sequence[Any]]:
    """Settings with a value per layer."""
    return [value for key, value in data.items() if _is_per_layer(key, value, count)]


def _is_per_layer(key: str, value: Any, count: int) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) == count
    return is_list and key not in ("architectures", *_SPECIAL_TOKENS)


def _with_layers(config: Any, data: dict[str, Any], layers: list[int]) -> Any:
    count = config.num_hidden_layers
    for key, value in data.items():
        if _is_per_layer(key, value, count):
            data[key] = [value[layer] for layer in layers]
    data[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    return type(config).from_dict(data)


def check_layers(large: Any, twin: Any, layers: Sequence[int], prefix: str) -> None:
    """See that a twin has a layer of every kind.

    Args:
        large: a model of true sizes; its parameters may be on `meta`.
        twin: its twin.
        layers: the layer of the large model that each layer of the twin stands for.
        prefix: name of the list of layers in both.

    Raises:
        UnsupportedError: some layer is of a kind that the twin does not have.
    """
    kinds, small = ([_kind(layer) for layer in m.get_submodule(prefix)] for m in (large, twin))
    chosen = [kinds[layer] for layer in layers]
    for layer, kind in enumerate(kinds):
        if kind not in chosen:
            raise UnsupportedError(
                f"layer {layer} is built otherwise than layers {list(layers)}, by a rule that is "
                "in no list of the configuration"
            )
    for i, one in enumerate(chosen):
        for j, other in enumerate(chosen[:i]):
            if (one == other) != (small[i] == small[j]):
                raise UnsupportedError(
                    f"layers {layers[j]} and {layers[i]} do not relate as those of a small twin"
                )


def _kind(layer: nn.Module) -> frozenset[object]:
    """All that construction decided about a layer, but for its index."""
    return frozenset(
        (name, type(module).__name__, _settings(module)) for name, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> tuple[object, ...]:
    plain = bool, int, float, str, type(None)
    return tuple(
        (key, value)
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain) and key not in ("layer_idx", "layer_id", "block_idx")
    )
