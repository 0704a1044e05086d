"""What the attention of a model is, as seen by running it once and by reading its configuration.

The configuration says which layers have windows or chunks. What layers hand to their attention
function says the rest: heads, widths, scale, cap, sinks.

Legend: `H` query heads, `K` kv heads, `D` head width, `P` rows, `E` width of looked-up rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heddle.config.model import ATTENTION, ForeignConfig, LayerKind, ModelConfig, RopeConfig
from heddle.config.visibility import Visibility
from heddle.errors import UnsupportedError
from heddle.models.transformers_any.build import NOT_THROUGH_INTERFACE
from heddle.models.transformers_any.port import connect
from heddle.models.transformers_any.quote import quoted
from heddle.models.transformers_any.twin import kv_heads

_MECHANISMS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "attention": "full",
}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer handed to its attention function."""

    module: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float | None
    softcap: float
    window: int | None
    has_sinks: bool


class RecordingPort:
    """Notes calls; the result is of the right shape and means nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[AttentionCall] = []
        self._names = {module: name for name, module in model.named_modules()}

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See `Port.attend`."""
        self.calls.append(
            AttentionCall(
                module=self._names[module],
                layer=int(getattr(module, "layer_idx", -1)),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                value_dim=value.shape[3],
                scale=options.get("scaling"),
                softcap=float(options.get("softcap") or 0.0),
                window=options.get("sliding_window"),
                has_sinks=options.get("s_aux") is not None,
            )
        )
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        return torch.zeros(shape, dtype=query.dtype, device=query.device)


def record_calls(model: Any, token_ids: torch.Tensor) -> list[AttentionCall]:
    """Run a model once and see what its layers ask for.

    Args:
        model: calling our attention function; filled, or on `meta`.
        token_ids: `[P]`, on the model's device.

    Raises:
        UnsupportedError: attention is not one call per layer of the kind that is served here.
    """
    port = RecordingPort(model)
    _run(model, port, input_ids=token_ids[None])
    return _checked(port.calls, model.config, model.config.num_hidden_layers)


def _run(model: Any, port: RecordingPort, **inputs: torch.Tensor) -> None:
    """One pass over `input_ids` `[1, P]` or `inputs_embeds` `[1, P, E]`."""
    connect(model, port)
    first = next(iter(inputs.values()))
    positions = torch.arange(first.shape[1], device=first.device)
    with torch.inference_mode():
        model(**inputs, position_ids=positions[None], use_cache=False)


def _checked(calls: list[AttentionCall], config: Any, num_layers: int) -> list[AttentionCall]:
    """The same calls, when they are those of the first `num_layers` layers and serve here."""
    layers = [call.layer for call in calls]
    if not layers:
        raise UnsupportedError(NOT_THROUGH_INTERFACE)
    if layers != list(range(num_layers)):
        raise UnsupportedError(
            f"attention is called for layers {layers}; one call per layer, in order, was expected"
        )
    _check_calls(calls, config)
    return calls


def check_shapes(large: Any, config: ModelConfig) -> None:
    """Run a model of true sizes on shapes alone, and see that it asks for what its twin asked for.

    Experts are chosen by values, and shapes have none, so that a mixture stops at its first ones:
    layers up to there are compared. `check_layers` has seen that the others are built alike.

    Args:
        large: on `meta`.
        config: as described.

    Raises:
        UnsupportedError: it does not, or stops before its first attention.
    """
    calls = _calls_on_shapes(large)
    expected = (config.num_query_heads, config.num_kv_heads, config.head_dim)
    for call in calls:
        found = (call.num_heads, call.num_kv_heads, call.head_dim)
        scale = config.attention_scale if call.scale is None else call.scale
        if found != expected or not math.isclose(scale or 0.0, config.attention_scale or 0.0):
            raise UnsupportedError(
                f"layer {call.layer} attends with (query heads, kv heads, width, scale) "
                f"{(*found, scale)}; {(*expected, config.attention_scale)} was expected from a twin"
            )


def _calls_on_shapes(large: Any) -> list[AttentionCall]:
    """Calls of all layers, or of those before the first one that needs values.

    Rows are given as they are when the model is served; GPT-2 looks for pads among ids.
    """
    port = RecordingPort(large)
    num_layers = large.config.num_hidden_layers
    try:
        _run(large, port, inputs_embeds=torch.zeros(1, 2, _row_width(large), device="meta"))
    except RuntimeError as error:
        if not _needs_values(error):
            raise
        if not port.calls:
            raise UnsupportedError(
                "values decide what it does before its first attention, so that its true sizes "
                f"cannot be compared with those of a small twin ({quoted(error)})"
            ) from error
        num_layers = len(port.calls)
    return _checked(port.calls, large.config, num_layers)


def _row_width(model: Any) -> int:
    """Of what the lookup gives; some are narrower than the layers."""
    return int(model.get_input_embeddings().embedding_dim)


def _needs_values(error: RuntimeError) -> bool:
    """True of what torch raises where a tensor on `meta` is asked for its values."""
    text = str(error).lower()
    return "meta tensors" in text or (isinstance(error, NotImplementedError) and "meta" in text)


def _check_calls(calls: Sequence[AttentionCall], config: Any) -> None:
    for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "softcap", "has_sinks"):
        if len({getattr(call, name) for call in calls}) > 1:
            raise UnsupportedError(f"layers differ in {name}")
    first = calls[0]
    if first.head_dim != first.value_dim:
        raise UnsupportedError(
            f"heads of keys and values differ in width ({first.head_dim}, {first.value_dim})"
        )
    expected = (config.num_attention_heads, head_dim(config))
    if (first.num_heads, first.head_dim) != expected:
        raise UnsupportedError(
            f"{first.num_heads} query heads of width {first.head_dim} come out of projections that "
            f"the configuration describes as {expected[0]} of {expected[1]}"
        )
    if first.num_kv_heads not in (1, kv_heads(config), config.num_attention_heads):
        raise UnsupportedError(f"{first.num_kv_heads} kv heads are not what the configuration says")


def head_dim(config: Any) -> int:
    """`D`."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def softmax_scale(calls: Sequence[AttentionCall], twin: Any, model: Any) -> float:
    """The scale of a model, from what the layers of its twin did.

    Args:
        calls: of the twin.
        twin: the twin.
        model: of true sizes; or the twin itself.

    Raises:
        UnsupportedError: it follows from nothing that is known here, or layers differ.
    """
    scales = {_scale(call, twin, model) for call in calls}
    if len(scales) > 1:
        raise UnsupportedError(f"layers differ in their softmax scale ({sorted(scales)})")
    return scales.pop()


def _scale(call: AttentionCall, twin: Any, model: Any) -> float:
    """That of the layer in the same place."""
    small = getattr(twin.get_submodule(call.module), "scaling", None)
    large = getattr(model.get_submodule(call.module), "scaling", None)
    if call.scale == 1.0:  # queries carry it
        return 1.0
    if isinstance(large, float | int) and call.scale == small:
        return float(large)
    if call.scale is None or math.isclose(call.scale, call.head_dim**-0.5, rel_tol=1e-6):
        return float(head_dim(model.config) ** -0.5)
    raise UnsupportedError(f"its softmax scale {call.scale} follows from an unknown rule")


def layer_list(calls: Sequence[AttentionCall]) -> str:
    """Name of the list of layers: `model.layers` of `model.layers.0.self_attn`."""
    found = re.fullmatch(r"(.+?)\.0\..+", calls[0].module)
    if found is None:
        raise UnsupportedError(f"its first layer, {calls[0].module}, is in no list")
    return found[1]


def describe(
    config: Any, config_json: str, calls: Sequence[AttentionCall], scale: float
) -> ModelConfig:
    """A `ModelConfig` of a configuration and of the calls of its twin.

    Args:
        config: the library's object.
        config_json: what ranks make it from.
        calls: of the twin.
        scale: of the softmax.
    """
    first = calls[0]
    num_heads = int(config.num_attention_heads)
    # Some models repeat kv heads before the call, some have one and do not say so.
    num_kv_heads = {first.num_heads: num_heads, 1: 1}.get(first.num_kv_heads, kv_heads(config))
    return ModelConfig(
        architecture=config.architectures[0],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        num_layers=config.num_hidden_layers,
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim(config),
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=1e-6,  # norms are the library's
        rope=RopeConfig(),  # and so are rotations
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        layer_kinds=layer_kinds(config, calls),
        attention_scale=scale,
        attention_softcap=first.softcap,
        has_sinks=first.has_sinks,
        foreign=ForeignConfig(config_json=config_json, refused=()),
    )


def layer_kinds(config: Any, calls: Sequence[AttentionCall]) -> tuple[LayerKind, ...]:
    """One kind per layer; empty where every layer sees everything.

    Raises:
        UnsupportedError: a type of layer that is not built here.
    """
    types = getattr(config, "layer_types", None)
    if types is None:
        windows = {call.window for call in calls}
        if len(windows) > 1:
            raise UnsupportedError("layers differ in their windows, by a rule that is in no list")
        types = ["full_attention" if windows == {None} else "sliding_attention"] * len(calls)
        types = [types[0]] * config.num_hidden_layers
    found = tuple(LayerKind(visibility=_visibility(config, type_)) for type_ in types)
    return () if set(found) == {ATTENTION} else found


def _visibility(config: Any, type_: str) -> Visibility:
    kind = _MECHANISMS.get(type_)
    if kind == "full":
        return Visibility()
    if kind == "window" and isinstance(config.sliding_window, int):
        return Visibility("window", config.sliding_window)
    if kind == "chunk" and isinstance(config.attention_chunk_size, int):
        return Visibility("chunk", config.attention_chunk_size)
    raise UnsupportedError(f"layer type {type_} is not known; known: {', '.join(_MECHANISMS)}")


def canonical_json(config: Any) -> str:
    """What ranks make a configuration from."""
    data = {"model_type": config.model_type, **config.to_dict()}
    return json.dumps(data, sort_keys=True, default=str)
