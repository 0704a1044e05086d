"""Checkpoints for ranks of which only the attention is run: right shapes, no memory."""

from __future__ import annotations

import torch

from heddle.config import ModelConfig

WIDTH = 8
"""Hidden channels and vocabulary: no projection is run."""


def zero_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """A checkpoint of few channels whose tensors share one zero; names as in Llama and DeepSeek.

    Args:
        model: of `WIDTH` channels, hidden units and words; grouped or latent attention.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WIDTH, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(model.num_layers):
        place = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{place}.{norm}.weight"] = (WIDTH,)
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"{place}.mlp.{name}.weight"] = (WIDTH, WIDTH)
        for name, found in _attention_shapes(model).items():
            shapes[f"{place}.self_attn.{name}.weight"] = found
    return {name: torch.zeros(1).expand(found) for name, found in shapes.items()}


def _attention_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    heads, mla = model.num_query_heads, model.mla
    queries = heads * model.head_dim
    if mla is None:
        keys = model.num_kv_heads * model.head_dim
        return {
            "q_proj": (queries, WIDTH),
            "k_proj": (keys, WIDTH),
            "v_proj": (keys, WIDTH),
            "o_proj": (WIDTH, queries),
        }
    up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return {
        "q_proj": (queries, WIDTH),
        "kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.qk_rope_head_dim, WIDTH),
        "kv_a_layernorm": (mla.kv_lora_rank,),
        "kv_b_proj": (up, mla.kv_lora_rank),
        "o_proj": (WIDTH, heads * mla.v_head_dim),
    }
