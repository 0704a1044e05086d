"""Small GGUF files, written with the `gguf` package from tiny checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

Kind = gguf.GGMLQuantizationType

ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "Qwen2ForCausalLM": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "GraniteForCausalLM": ("granite", gguf.MODEL_ARCH.GRANITE),
    "Olmo2ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
}
PAIRED = ("llama", "granite")


def pair_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Half-split rotary order -> elements of a pair side by side, as `llama` files hold it."""
    out = np.empty_like(rows)
    width = len(rows) // num_heads
    for head in range(num_heads):
        for element in range(width):
            half, pair = divmod(element, width // 2)
            out[head * width + 2 * pair + half] = rows[head * width + element]
    return out


def halve_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `pair_rows`."""
    order = pair_rows(np.arange(len(rows)), num_heads)
    out = np.empty_like(rows)
    out[order] = rows
    return out


def write_gguf(
    path: Path,
    checkpoint: Path,
    *,
    kind: Kind = Kind.F32,
    extra_fields: Mapping[str, object] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str | None = None,
    value_length: int | None = None,
    rope_theta: float | None = None,
    num_parts: int = 1,
) -> Path:
    """Convert a tiny checkpoint; matrices whose rows are whole blocks are stored as `kind`."""
    config = json.loads((checkpoint / "config.json").read_text())
    name, arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture or name)
    prefix = architecture or name
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(value_length or head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta or config["rope_parameters"]["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    if num_parts > 1:
        writer.add_uint16("split.count", num_parts)
    if name == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    for key, value in (extra_fields or {}).items():
        _add(writer, f"{prefix}.{key}", value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for key, tensor in load_file(checkpoint / "model.safetensors").items():
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if prefix in PAIRED and ".q_proj." in key:
            tensor = pair_rows(tensor, config["num_attention_heads"])
        if prefix in PAIRED and ".k_proj." in key:
            tensor = pair_rows(tensor, config["num_key_value_heads"])
        _add_tensor(writer, stored, tensor, kind)
    for stored, tensor in (extra_tensors or {}).items():
        writer.add_tensor(stored, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_matrix(path: Path, stored: np.ndarray, kind: Kind) -> Path:
    """A file with one tensor, `blk.0.ffn_down.weight`, from bytes already in the form of `kind`."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("blk.0.ffn_down.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        raise TypeError(f"{key}={value!r}")


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: Kind) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if tensor.ndim == 2 and tensor.shape[1] % block == 0 and kind != Kind.F32:
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, tensor)
