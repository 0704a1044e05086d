"""Tiny random checkpoints, written by transformers, and a dense attention for one rank.

Weights are drawn so that mistakes show: each head has its own scale (a wrong head cannot cancel
out), norm weights are far from 1 (a skipped norm shows), and logits are spread widely (near ties
are rare).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

VOCAB_SIZE = 131
MAX_POSITIONS = 512

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
}


def _dense_sizes(num_query_heads: int, num_kv_heads: int, head_dim: int = 8) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 72 if num_query_heads % 3 == 0 else 64,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": num_query_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }


def _latent_sizes(q_lora_rank: int | None) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 100,
        "moe_intermediate_size": 22,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "kv_lora_rank": 24,
        "q_lora_rank": q_lora_rank,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": dict(_YARN),
        "eos_token_id": 2,
        "bos_token_id": 1,
    }


def _llama(num_query_heads: int, num_kv_heads: int, **options: Any) -> LlamaConfig:
    return LlamaConfig(**_dense_sizes(num_query_heads, num_kv_heads), **options)


_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-8-2": lambda: _llama(8, 2),
    "llama-8-1": lambda: _llama(8, 1),
    "llama-4-4": lambda: _llama(4, 4),
    "llama-9-3": lambda: _llama(9, 3),
    "llama-6-2": lambda: _llama(6, 2),
    "llama-bias": lambda: _llama(
        6, 2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": lambda: MistralConfig(**_dense_sizes(8, 2), sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_dense_sizes(8, 2)),
    "qwen3": lambda: Qwen3Config(**_dense_sizes(8, 2, head_dim=16)),
    "deepseek-v2": lambda: DeepseekV2Config(
        **_latent_sizes(q_lora_rank=None), topk_method="group_limited_greedy"
    ),
    "deepseek-v2-lora": lambda: DeepseekV2Config(**_latent_sizes(20), topk_method="greedy"),
    "deepseek-v3": lambda: DeepseekV3Config(
        **_latent_sizes(q_lora_rank=20), norm_topk_prob=True, num_nextn_predict_layers=0
    ),
    "deepseek-v3-direct": lambda: DeepseekV3Config(
        **_latent_sizes(q_lora_rank=None), norm_topk_prob=False, num_nextn_predict_layers=0
    ),
}
TINY_NAMES = tuple(_CONFIGS)


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The transformers model itself, float32, evaluation mode, with the weights of `build_tiny`."""
    config = _CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in sorted(model.state_dict().items()):
            if tensor.is_floating_point():
                tensor.copy_(_draw(key, tensor, config, generator))
    return model.eval()


def build_tiny(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a tiny checkpoint (config.json, generation_config.json, model.safetensors).

    Args:
        folder: where the checkpoint's own folder is made.
        name: one of `TINY_NAMES`: family, then query and kv heads where they vary.
        seed: of the weights.
    """
    path = folder / f"{name}-{seed}"
    tiny_model(name, seed).save_pretrained(path, safe_serialization=True)
    assert json.loads((path / "config.json").read_text())["architectures"]
    return path


def _draw(key: str, tensor: torch.Tensor, config: Any, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if "norm" in key:
        return 1.0 + 0.5 * noise  # far from 1, some below zero
    if key.endswith("e_score_correction_bias"):
        return 0.2 * noise
    if key.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in key:
        return noise
    if "lm_head" in key:
        return 0.5 * noise
    drawn = noise * (1.2 / tensor.shape[-1] ** 0.5)
    return drawn * _head_scales(key, tensor, config)


def _head_scales(key: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """A column of factors, one value per head of a projection; ones elsewhere."""
    sides = ("q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj")
    if not any(f".{side}." in key for side in sides):
        return torch.ones(1)
    is_kv = ".k_proj." in key or ".v_proj." in key
    num_heads = config.num_key_value_heads if is_kv else config.num_attention_heads
    scales = torch.linspace(0.6, 1.6, num_heads) if num_heads > 1 else torch.ones(1)
    return scales.repeat_interleave(tensor.shape[0] // num_heads)[:, None]


class DenseAttention:
    """A `StepAttention` for one rank and one whole prompt: softmax over everything, no cache.

    Query head j reads kv head `j // (query heads // kv heads)`; rows
    are in position order.
    """

    def gqa(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        return _attend(query, key, value, query.shape[-1] ** -0.5)

    def mla(
        self,
        layer: int,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        narrow = latent[:, : key_up.shape[2]]
        rotary_key = latent[:, None, key_up.shape[2] :].expand(-1, query_rope.shape[1], -1)
        key = torch.einsum("sl,hnl->shn", narrow, key_up)
        value = torch.einsum("sl,hlv->shv", narrow, value_up)
        query = torch.cat([query_nope, query_rope], dim=-1)
        return _attend(query, torch.cat([key, rotary_key], dim=-1), value, scale)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal softmax over all rows: query, key `[M, h, D]`, value `[M, h, Dv]`."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
