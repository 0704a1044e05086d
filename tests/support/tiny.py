"""Tiny random checkpoints, written by transformers, and a dense attention for one rank.

Weights are drawn so that mistakes show: each head has its own scale (a wrong head cannot cancel
out), norm weights are far from 1 (a skipped norm shows), and logits are spread widely (near ties
are rare).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bamba import BambaConfig
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v32 import DeepseekV32Config
from transformers.models.exaone4 import Exaone4Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.glm import GlmConfig
from transformers.models.glm4 import Glm4Config
from transformers.models.glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe_lite import Glm4MoeLiteConfig
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.granite import GraniteConfig
from transformers.models.llama import LlamaConfig
from transformers.models.llama4 import Llama4TextConfig
from transformers.models.minimax import MiniMaxConfig
from transformers.models.minimax_m2 import MiniMaxM2Config
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.olmo2 import Olmo2Config
from transformers.models.olmo3 import Olmo3Config
from transformers.models.olmoe import OlmoeConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.smollm3 import SmolLM3Config

from heddle.attention.adapter_rows import AdapterRows
from heddle.attention.base import IndexRows
from heddle.attention.recurrent.terms import RecurrentInputs
from heddle.config.model import ModelConfig
from tests.support.recurrence import recur

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


def _mixture_sizes(**changes: Any) -> dict[str, Any]:
    experts = {"num_experts_per_tok": 3, "moe_intermediate_size": 22}
    return _dense_sizes(6, 2) | experts | changes


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
    "granite": lambda: GraniteConfig(
        **_dense_sizes(6, 2),
        embedding_multiplier=1.7,
        attention_multiplier=0.21,
        residual_multiplier=0.6,
        logits_scaling=0.4,
    ),
    "smollm3": lambda: SmolLM3Config(
        **_dense_sizes(6, 2) | {"num_hidden_layers": 4},
        no_rope_layer_interval=3,
        pad_token_id=0,
        use_sliding_window=True,
        sliding_window=9,
    ),
    # Rotations that depend on a length: prompts here are longer than the original window.
    "phi3": lambda: Phi3Config(
        **_dense_sizes(6, 2, head_dim=12),
        pad_token_id=0,
        original_max_position_embeddings=24,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.3],
            "long_factor": [1.2, 2.5, 7.0],
        },
    ),
    "phi3-window": lambda: Phi3Config(**_dense_sizes(8, 2), pad_token_id=0, sliding_window=9),
    "llama-dynamic": lambda: LlamaConfig(
        **_dense_sizes(6, 2) | {"max_position_embeddings": 24},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "olmo2": lambda: Olmo2Config(**_dense_sizes(6, 2)),
    "olmo3": lambda: Olmo3Config(
        **_dense_sizes(6, 2),
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": dict(_YARN),
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    ),
    "exaone4": lambda: Exaone4Config(
        **_dense_sizes(6, 2), sliding_window=9, sliding_window_pattern=2
    ),
    "glm": lambda: GlmConfig(**_dense_sizes(6, 2), pad_token_id=0),
    "glm4": lambda: Glm4Config(**_dense_sizes(6, 2), pad_token_id=0),
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
    # A choice of far fewer keys than a prompt has rows. With many heads no score is exactly zero: a
    # tie there would be decided by chance in transformers.
    "deepseek-v32": lambda: DeepseekV32Config(
        **_latent_sizes(q_lora_rank=20), index_topk=8, index_head_dim=12, index_n_heads=16
    ),
    # Windows, chunks, limits and caps are small, so that each of them matters in a short prompt.
    "mistral-window": lambda: MistralConfig(**_dense_sizes(8, 2), sliding_window=9),
    "qwen2-window": lambda: Qwen2Config(
        **_dense_sizes(8, 2), use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3-window": lambda: Qwen3Config(
        **_dense_sizes(8, 2), use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "gemma2": lambda: Gemma2Config(
        **_dense_sizes(6, 2),
        sliding_window=9,
        query_pre_attn_scalar=11,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=60.0,  # lower, and the best logits all lie at the cap
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_dense_sizes(6, 2) | {"num_hidden_layers": 3},
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=11,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_dense_sizes(6, 2) | {"intermediate_size": 22},
        sliding_window=9,
        num_local_experts=5,
        num_experts_per_tok=3,
        swiglu_limit=1.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    ),
    "llama4": lambda: Llama4TextConfig(
        **_dense_sizes(6, 2) | {"num_hidden_layers": 4, "intermediate_size": 22},
        intermediate_size_mlp=40,
        num_local_experts=5,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=3,
        attention_chunk_size=8,
        floor_scale=8,
        attn_scale=0.7,
    ),
    "mixtral": lambda: MixtralConfig(
        **_mixture_sizes(intermediate_size=22), num_local_experts=5, sliding_window=9
    ),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **_mixture_sizes(num_hidden_layers=3),
        num_experts=5,
        shared_expert_intermediate_size=31,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_mixture_sizes(num_hidden_layers=3),
        num_experts=5,
        decoder_sparse_step=2,
        norm_topk_prob=True,
    ),
    # Heads of a recurrence are as uneven as they may be: 6 over 2, 3 or 4 ranks.
    "qwen3-next": lambda: Qwen3NextConfig(
        **_mixture_sizes(num_hidden_layers=4, head_dim=16),
        num_experts=5,
        shared_expert_intermediate_size=31,
        mlp_only_layers=[1],
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_value_heads=6,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
    ),
    "bamba": lambda: BambaConfig(
        **_dense_sizes(6, 2) | {"num_hidden_layers": 4, "head_dim": 12},
        attn_layer_indices=[2],
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=5,
        mamba_chunk_size=8,
        mamba_proj_bias=True,
        time_step_limit=(0.3, 0.9),
    ),
    "minimax": lambda: MiniMaxConfig(
        **_mixture_sizes(num_hidden_layers=4, intermediate_size=22),
        num_local_experts=5,
        block_size=8,
        full_attn_alpha_factor=1.3,
        full_attn_beta_factor=0.7,
        linear_attn_alpha_factor=0.9,
        linear_attn_beta_factor=1.2,
        mlp_alpha_factor=1.1,
        mlp_beta_factor=0.8,
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **_mixture_sizes(num_hidden_layers=3, head_dim=12),
        n_routed_experts=6,
        n_shared_experts=2,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
        attention_bias=True,
        use_qk_norm=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "olmoe": lambda: OlmoeConfig(
        **_mixture_sizes(intermediate_size=22, head_dim=12), num_experts=5
    ),
    "minimax-m2": lambda: MiniMaxM2Config(
        **_mixture_sizes(intermediate_size=22, head_dim=12), num_local_experts=5, rotary_dim=8
    ),
    "glm4-moe-lite": lambda: Glm4MoeLiteConfig(
        **_latent_sizes(q_lora_rank=20) | {"rope_parameters": None, "n_group": 1, "topk_group": 1},
        mlp_layer_types=["sparse", "dense", "sparse"],
        attention_bias=True,
    ),
    "glm5": lambda: GlmMoeDsaConfig(
        **_latent_sizes(q_lora_rank=20), index_topk=8, index_head_dim=12, index_n_heads=16
    ),
}
TINY_NAMES = tuple(_CONFIGS)


def tiny_config(name: str) -> PreTrainedConfig:
    """The configuration of a tiny model, as transformers writes it."""
    config: PreTrainedConfig = _CONFIGS[name]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


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
    if key.endswith(("slope_rate", "query_decay", "key_decay", "diagonal_decay")):
        return tensor  # follow from the configuration
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if "norm" in key:
        if config.model_type == "qwen3_next" and "linear_attn" not in key:
            return 0.25 * noise  # stored less 1
        return 1.0 + 0.5 * noise  # far from 1, some below zero
    if key.endswith("e_score_correction_bias"):
        return 0.2 * noise
    if key.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in key or key.endswith("sinks"):
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
    """A `StepOps` for one rank and one whole prompt: softmax over a dense mask, no cache.

    Query head j reads kv head `j // (query heads // kv heads)`; row i is at position i.

    Args:
        config: whose scale, caps, windows, chunks are applied; None: plain causal attention.
    """

    adapters: AdapterRows | None = None

    def __init__(self, config: ModelConfig | None = None) -> None:
        self._config = config

    def enter(self, part: str) -> None: ...

    def repeated(
        self, inputs: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        return compute()

    def gqa(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        config, scale, softcap = self._config, query.shape[-1] ** -0.5, 0.0
        if config is not None:
            assert config.has_sinks == (sinks is not None)
            scale, softcap = config.attention_scale or scale, config.attention_softcap
        hidden = _hidden_keys(config, layer, len(query))
        return _attend(query, key, value, scale, hidden, softcap, sinks)

    def recurrent(self, layer: int, inputs: RecurrentInputs) -> torch.Tensor:
        return recur(inputs)

    def mla(
        self,
        layer: int,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
        index: IndexRows | None = None,
    ) -> torch.Tensor:
        narrow = latent[:, : key_up.shape[2]]
        rotary_key = latent[:, None, key_up.shape[2] :].expand(-1, query_rope.shape[1], -1)
        key = torch.einsum("sl,hnl->shn", narrow, key_up)
        value = torch.einsum("sl,hlv->shv", narrow, value_up)
        query = torch.cat([query_nope, query_rope], dim=-1)
        hidden = _hidden_keys(None, layer, len(query))
        if index is not None:
            assert self._config is not None
            assert self._config.sparse is not None
            hidden = _all_but_the_best(index, hidden, self._config.sparse.top_k)
        return _attend(query, torch.cat([key, rotary_key], dim=-1), value, scale, hidden)


def _all_but_the_best(index: IndexRows, hidden: torch.Tensor, top_k: int) -> torch.Tensor:
    """`[M, M]`: hidden keys, and those that an indexer ranks below the first `top_k`."""
    products = torch.einsum("qhd,kd->qkh", index.index_query, index.index_key).relu()
    scores = torch.einsum("qkh,qh->qk", products, index.weights.to(products.dtype))
    scores = scores.masked_fill(hidden, float("-inf"))
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return hidden | torch.ones_like(hidden).scatter(1, chosen, False)


def _hidden_keys(config: ModelConfig | None, layer: int, num_rows: int) -> torch.Tensor:
    """`[M, M]`: key k is hidden from query q."""
    query, key = torch.arange(num_rows)[:, None], torch.arange(num_rows)[None, :]
    hidden = key > query
    if config is None:
        return hidden
    rule = config.kind_of(layer).visibility
    if rule.kind == "window":
        return hidden | ((query - key >= rule.size) & (key >= rule.num_first))
    if rule.kind == "chunk":
        return hidden | (query // rule.size != key // rule.size)
    return hidden


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    hidden: torch.Tensor,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax over the keys that are not hidden: query, key `[M, h, D]`, value `[M, h, Dv]`."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)
