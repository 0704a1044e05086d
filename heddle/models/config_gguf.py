"""A model's shapes and constants, read from a GGUF header."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from heddle.config.model import Factors, ModelConfig, ResidualFactors, RopeConfig
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields
from heddle.models.config_layers import uniform_window
from heddle.models.gguf_header import GgufHeader, read_gguf_header

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}

# Llama 3.1 to 3.3 publish one shape of frequency scaling; only `factor` differs between them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_WINDOW = 1.0, 4.0, 8192
_F32 = 0


def read_gguf_config(path: Path) -> ModelConfig:
    """Read what a GGUF model is.

    Raises:
        ModelFileError: the file is damaged, or a value is missing or malformed.
        UnsupportedError: the architecture or a setting of it is not built here.
    """
    header = read_gguf_header(path)
    fields = Fields(path, header.entries)
    name = fields.text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise fields.unsupported("general.architecture", f"known in GGUF files: {known}")
    if fields.integer("split.count", 1, minimum=0) > 1:
        raise fields.unsupported("split.count", "join the parts with `llama-gguf-split --merge`")
    hidden_size = fields.integer(f"{name}.embedding_length")
    num_query_heads = fields.integer(f"{name}.attention.head_count")
    head_dim = fields.integer(
        f"{name}.attention.key_length", max(1, hidden_size // num_query_heads)
    )
    if head_dim % 2:
        raise ModelFileError(f"{path}: head width {head_dim} must be even, for rotary pairs")
    if fields.integer(f"{name}.attention.value_length", head_dim) != head_dim:
        raise fields.unsupported(f"{name}.attention.value_length", f"it must be {head_dim}")
    if fields.integer(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise fields.unsupported(f"{name}.rope.dimension_count", f"it must be {head_dim}")
    num_layers = fields.integer(f"{name}.block_count")
    window = fields.optional_integer(f"{name}.attention.sliding_window")
    if name == "olmo2" and window is not None:
        # Files of OLMo 3 go by the same name; which of its layers have a window is not told.
        raise fields.unsupported("olmo2.attention.sliding_window", "OLMo 2 has none")
    config = ModelConfig(
        architecture=GGUF_ARCHITECTURES[name],
        vocab_size=_vocab_size(fields, name),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{name}.feed_forward_length"),
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=fields.integer(f"{name}.attention.head_count_kv", num_query_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer(f"{name}.context_length"),
        rms_norm_eps=fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope=_rope(header, fields, name, head_dim),
        tie_word_embeddings="output.weight" not in header.tensors,
        qk_norm=name == "qwen3",
        qk_width_norm=name == "olmo2",
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        layer_kinds=uniform_window(num_layers, window),
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(fields),
    )
    return _with_factors(config, fields) if name == "granite" else config


def _with_factors(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Granite: Llama with four multipliers."""
    factors = Factors(block=fields.number("granite.residual_scale", 1.0))
    return replace(
        config,
        embedding_scale=fields.number("granite.embedding_scale", 1.0),
        attention_scale=fields.number("granite.attention.scale", config.head_dim**-0.5),
        residual_factors=ResidualFactors(attention=factors, feed_forward=factors),
        logits_scale=1.0 / fields.number("granite.logit_scale", 1.0),
    )


def _vocab_size(fields: Fields, name: str) -> int:
    if f"{name}.vocab_size" in fields:
        return fields.integer(f"{name}.vocab_size")
    return len(fields.strings("tokenizer.ggml.tokens"))


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """End of sequence first, then end of turn and end of message, where the file names them."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(id_ for key in keys for id_ in fields.token_ids(key)))


def _rope(header: GgufHeader, fields: Fields, name: str, head_dim: int) -> RopeConfig:
    theta = fields.number(f"{name}.rope.freq_base", 10000.0)
    if "rope_freqs.weight" in header.tensors:
        return _llama3_rope(header, theta, head_dim)
    key = f"{name}.rope.scaling.type"
    kind = fields.text(key, "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = fields.number(f"{name}.rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=factor)
    if kind == "yarn":
        if theta <= 1.0:
            raise fields.wrong(f"{name}.rope.freq_base", "yarn needs a number above 1")
        original = fields.integer(f"{name}.rope.scaling.original_context_length")
        return RopeConfig(
            theta=theta,
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=original,
        )
    raise fields.unsupported(key, "known: none, linear, yarn")


def _llama3_rope(header: GgufHeader, theta: float, head_dim: int) -> RopeConfig:
    """Recover the Llama 3 scaling from the divisors that a converter wrote down.

    Each frequency f is divided by 1 (short waves), by `factor` (long waves), or by a blend of the
    two in between. The largest divisor is `factor`; the others must then agree, else the file uses
    a scaling that is not known here.
    """
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.type_id != _F32 or tensor.shape != (head_dim // 2,):
        raise ModelFileError(
            f"{header.path}: rope_freqs.weight has type {tensor.type_id} and shape {tensor.shape}; "
            f"float32 and ({head_dim // 2},) were expected"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        divisors = np.frombuffer(file.read(4 * (head_dim // 2)), dtype="<f4").astype(np.float64)
    if divisors.shape != tensor.shape:
        raise ModelFileError(f"{header.path}: ends inside rope_freqs.weight")
    factor = float(divisors.max())
    if not np.allclose(divisors, _llama3_divisors(theta, head_dim, factor), rtol=1e-4, atol=0):
        raise UnsupportedError(
            f"{header.path}: rope_freqs.weight is not the Llama 3 frequency scaling; "
            "use the safetensors files of this model"
        )
    if factor == 1.0:
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=factor,
        original_max_position_embeddings=_LLAMA3_WINDOW,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
    )


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (_LLAMA3_WINDOW / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = smooth.clip(0.0, 1.0)
    divisors: np.ndarray = 1.0 / ((1.0 - smooth) / factor + smooth)
    return divisors
