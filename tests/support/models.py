"""Model configurations for tests that need shapes only."""

from __future__ import annotations

from typing import Any

from heddle.config import MLAConfig, ModelConfig, RopeConfig


def model_config(**changes: Any) -> ModelConfig:
    """A small grouped-query model: 9 query heads, 3 kv heads, head size 64, 30 layers."""
    settings: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 128,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_query_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "tie_word_embeddings": True,
    }
    return ModelConfig(**settings | changes)


def latent_config(**changes: Any) -> ModelConfig:
    """A latent-attention model: rows of 512 + 64, shared by 16 heads."""
    mla = MLAConfig(
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    shapes = {"num_query_heads": 16, "num_kv_heads": 1, "head_dim": 192, "num_layers": 2}
    return model_config(**{"mla": mla, **shapes, **changes})
