"""A model's shapes, where the transformers library knows its architecture and we do not.

Names and settings that cannot be exact are refused in words. What is left is tried on a small twin
with random weights (`transformers_any.probe`). The library is imported only when this is asked for.

Source: `transformers.AutoModelForCausalLM`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import lru_cache
from typing import Any

from heddle.config.model import ModelConfig
from heddle.config.rope import LENGTH_DEPENDENT
from heddle.errors import UnsupportedError
from heddle.models.config_common import bos_token_id, checkpoint_dtype
from heddle.models.config_fields import Fields
from heddle.models.transformers_any.quote import quoted

_STAGES = "its layers are the library's own and are kept together"
_OWN_PROJECTIONS = "its projections are the library's own and give one rank's heads"
_OLD_NAMES = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Read by the library wherever rotary settings are."""
_DROPPED = (
    "quantization_config",
    "auto_map",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
)
"""Keys that say how weights are stored, where code lies, or what a call returns; none of that is
the library's to know.
"""


def knows_model_type(fields: Fields) -> bool:
    """True when the installed library has a configuration of this `model_type`."""
    from transformers import CONFIG_MAPPING  # slow to import, and only for models unknown here

    return "model_type" in fields and fields.text("model_type") in CONFIG_MAPPING


def read_any_config(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model that the transformers library runs.

    Args:
        fields: top level of `config.json`.
        eos: ids that end a text.

    Raises:
        UnsupportedError: the library does not know the model, or it cannot be exact here.
    """
    architecture = fields.strings("architectures")[0] if "architectures" in fields else ""
    where = f"{fields.path}: {architecture or 'a model without architectures'} cannot be served "
    where += "through transformers: "
    if not knows_model_type(fields):
        raise UnsupportedError(f"{where}the installed library has no such model_type")
    try:
        config = _read(fields.as_json(without=_DROPPED))
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}{error}") from error
    except ImportError as error:
        reason = f"the installed library is too old ({quoted(error)})"
        raise UnsupportedError(f"{where}{reason}") from error
    fields.asked |= _setting_names(fields)
    return replace(
        config,
        bos_token_id=bos_token_id(fields),
        eos_token_ids=eos,
        checkpoint_dtype=checkpoint_dtype(fields),
    )


def _setting_names(fields: Fields) -> set[str]:
    """Dotted names of the values that the library reads; a misspelt one is not among them."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[fields.text("model_type")]
    names = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    names |= set(_OLD_NAMES)
    nested = {name: fields.section(name) for name in names if fields.is_object(name)}
    return names | {f"{name}.{key}" for name, part in nested.items() for key in part or ()}


@lru_cache(maxsize=8)
def _read(config_json: str) -> ModelConfig:
    """The same, of a text; a text is tried once."""
    from heddle.models.transformers_any.build import create_config

    config = create_config(config_json)
    _refuse_by_name(config)
    try:
        return _try(config, config_json)
    except UnsupportedError:
        raise
    except Exception as error:  # of the library's code, of any kind
        raise UnsupportedError(
            f"a trial of it fails in the library's code ({type(error).__name__}: {quoted(error)})"
        ) from error


def _refuse_by_name(config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise UnsupportedError(f"model_type={config.model_type} has no causal language model")
    if list(config.architectures or ()) != [name]:
        raise UnsupportedError(f"architectures={config.architectures}; {name} was expected")
    if config.is_encoder_decoder:
        raise UnsupportedError("encoder-decoder models are not served")
    if config.get_text_config() is not config or config.sub_configs:
        raise UnsupportedError("models with other parts than a text decoder are not served")
    if not getattr(config, "is_causal", True):
        raise UnsupportedError("is_causal=False; a decoder looks back only")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in LENGTH_DEPENDENT:
            raise UnsupportedError(
                f"rope_type={rope_type}; the library's rotations depend on the longest row of a "
                "batch, so that requests would change one another"
            )


def _rope_types(parameters: Any) -> list[str]:
    """The kinds of one rotary table, or of one for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return [str(entry.get("rope_type", "default")) for entry in (nested or [parameters])]


def _try(config: Any, config_json: str) -> ModelConfig:
    from heddle.models.transformers_any import probe, traits, twin
    from heddle.models.transformers_any.build import create_shapes

    small = create_shapes(twin.twin_config(config))
    probe.fill_randomly(small)
    calls = traits.record_calls(small, probe.probe_tokens())
    large = create_shapes(config)
    twin.check_layers(large, small, twin.chosen_layers(config), traits.layer_list(calls))
    scale, small_scale = (traits.softmax_scale(calls, small, model) for model in (large, small))
    small_json = traits.canonical_json(small.config)
    tried = probe.create_twin(small, traits.describe(small.config, small_json, calls, small_scale))
    probe.check_alone(tried)
    refused = [("pp", _STAGES), ("a2a+Wq", _OWN_PROJECTIONS)]
    if reason := probe.tensor_parallel_refusal(tried):
        refused.append(("tp", reason))
    described = traits.describe(config, config_json, calls, scale)
    traits.check_shapes(large, described)
    return probe.with_refusals(described, tuple(refused))
