"""A model of transformers without its weights: shapes on the `meta` device, real constants.

Only classes of the installed library are used; code that a repository ships is never run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers import initialization as hf_initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from heddle.errors import UnsupportedError
from heddle.models.transformers_any.port import ATTENTION_NAME, register_attention
from heddle.models.transformers_any.quote import quoted

NOT_THROUGH_INTERFACE = "its attention does not go through the attention interface"
_BUILDING = threading.Lock()
"""The library patches functions of torch while it builds; ranks may be threads."""


def create_config(config_json: str) -> Any:
    """The library's configuration object.

    Args:
        config_json: a `config.json` whose `model_type` the library knows.

    Raises:
        UnsupportedError: the library refuses a value.
    """
    data = json.loads(config_json, object_hook=_decoded)
    try:
        return CONFIG_MAPPING[data["model_type"]].from_dict(data)
    except Exception as error:  # a library's own checks, of any kind
        raise UnsupportedError(
            f"transformers refuses this configuration ({quoted(error)})"
        ) from error


def _decoded(data: dict[str, Any]) -> Any:
    """The library writes infinity as `{"__float__": "Infinity"}`."""
    return float(data["__float__"]) if data.keys() == {"__float__"} else data


def create_shapes(config: Any, attention: str = ATTENTION_NAME) -> Any:
    """The causal model of a configuration, in evaluation mode; parameters are on `meta`.

    Args:
        config: of `create_config`; it is changed to name the attention.
        attention: whose function layers call.

    Raises:
        UnsupportedError: the model has attention functions of its own only.
    """
    register_attention()
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    try:
        with _BUILDING, torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    except KeyError as error:
        if error.args == (ATTENTION_NAME,):  # looked up in a list of the model's own
            raise UnsupportedError(NOT_THROUGH_INTERFACE) from error
        raise
    return model.eval()


def fill_constants(model: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies.

    Raises:
        UnsupportedError: one of them is not computed by the library's initialiser.
    """
    if device.type == "meta":  # the model is only weighed
        return
    for name, module in model.named_modules():
        first = _initialised(model, module, device, fill=0)
        second = _initialised(model, module, device, fill=1)
        for key, value in first.items():
            if not torch.equal(value, second[key]):
                raise UnsupportedError(
                    f"constant {name}.{key} of {type(model).__name__} is not computed by its "
                    "initialiser"
                )


def _initialised(
    model: Any, module: nn.Module, device: torch.device, fill: int
) -> dict[str, torch.Tensor]:
    """A module's own constants: filled with one number, then initialised by the library."""
    constants = dict(_constants(module))
    if constants:
        for key, buffer in constants.items():
            module._buffers[key] = torch.full(buffer.shape, fill, dtype=buffer.dtype, device=device)
        with _BUILDING, torch.no_grad(), hf_initialization.guard_torch_init_functions():
            model._init_weights(module)
    return dict(_constants(module))


def _constants(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, buffer in module._buffers.items():
        if buffer is not None and key in module._non_persistent_buffers_set:
            yield key, buffer
