"""Shapes and constants of Llama and of its relatives, differing by a bias, norm or window."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import LayerKind, ModelConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_layers import FULL, SLIDING, read_window_kinds, uniform_window
from heddle.models.config_rope import read_rope

_QWEN3_HEAD_DIM = 128  # of the family, whatever hidden_size / heads is
_QWEN_FULL_LAYERS = 28  # layers below see everything, where the file does not say


def read_dense_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a dense model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    llama = architecture == "LlamaForCausalLM"
    attention_bias = (llama or qwen3) and fields.boolean("attention_bias", False)
    base = read_base(
        fields,
        architecture,
        eos,
        read_rope(fields, interleaved=False),
        default_head_dim=_QWEN3_HEAD_DIM if qwen3 else None,
    )
    return replace(
        base,
        qk_norm=qwen3,
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=llama and fields.boolean("mlp_bias", False),
        layer_kinds=_layer_kinds(fields, architecture, base.num_layers),
    )


def _layer_kinds(fields: Fields, architecture: str, num_layers: int) -> tuple[LayerKind, ...]:
    """Mistral has its window in every layer, Qwen in the layers above `max_window_layers`."""
    window = _sliding_window(fields, architecture)
    if window is None or architecture == "MistralForCausalLM":
        return uniform_window(num_layers, window)
    first = fields.integer("max_window_layers", _QWEN_FULL_LAYERS, minimum=0)
    return read_window_kinds(fields, num_layers, lambda layer: SLIDING if layer >= first else FULL)


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    """The window in tokens. Qwen files state one and switch it off by another key."""
    uses_window = architecture == "MistralForCausalLM" or (
        architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
        and fields.boolean("use_sliding_window", False)
    )
    return fields.optional_integer("sliding_window") if uses_window else None
