"""The demo model in transformers, its file read by rules written out here."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heddle.models.gguf_header import read_gguf_header
from tests.support.gguf_files import halve_rows


def reference_model(path: Path) -> LlamaForCausalLM:
    """SmolLM2-135M as published, with the file's weights put in by this test's own rules."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    tensors = read_gguf_header(path).tensors
    state = {}
    for name, parameter in model.named_parameters():
        tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        num_bytes = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        stored = np.fromfile(path, np.uint8, int(np.prod(num_bytes)), offset=tensor.offset)
        values = gguf.dequantize(stored.reshape(num_bytes), kind)
        if ".q_proj." in name or ".k_proj." in name:
            values = halve_rows(values, len(values) // 64)
        assert values.shape == parameter.shape
        state[name] = torch.from_numpy(values.astype(np.float32))
    model.load_state_dict(
        state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True
    )
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()
