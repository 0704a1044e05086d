"""GLM mixtures read from published spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import ModelConfig
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import write_config

GLM_4_5: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 151552,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, GLM_4_5, **changes))


def test_published_settings(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (96, 8, 128)
    assert (config.rotary_dim, config.rope.theta, config.rope.interleaved) == (64, 1e6, False)
    assert (config.qk_norm, config.qkv_bias, config.output_bias) == (True, True, False)
    assert config.moe is not None
    assert (config.moe.scoring, config.moe.top_k_method) == ("sigmoid", "noaux_tc")
    assert (config.moe.num_experts, config.moe.num_experts_per_token) == (160, 8)
    assert (config.moe.shared_width, config.moe.routed_scaling_factor) == (1536, 2.5)
    assert [config.moe.has_experts(layer) for layer in (2, 3, 91)] == [False, True, True]
    assert config.eos_token_ids == (151329, 151336, 151338)


def test_absent_settings_are_those_of_the_family(tmp_path: Path) -> None:
    absent = (
        "partial_rotary_factor",
        "use_qk_norm",
        "attention_bias",
        "n_group",
        "topk_group",
        "n_shared_experts",
        "first_k_dense_replace",
        "routed_scaling_factor",
    )
    config = read(tmp_path, **dict.fromkeys(absent, ...))
    assert (config.rotary_dim, config.qk_norm, config.qkv_bias) == (64, False, False)
    assert config.moe is not None
    assert (config.moe.num_groups, config.moe.top_k_groups) == (1, 1)
    assert (config.moe.num_shared_experts, config.moe.first_dense_layers) == (1, 1)
    assert config.moe.routed_scaling_factor == 1.0


def test_the_share_that_turns_may_stand_among_the_rotary_settings(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = read(tmp_path, rope_parameters=rope, partial_rotary_factor=...)
    assert (config.rotary_dim, config.rope.theta) == (32, 1e4)


def test_what_is_not_built_or_not_possible_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"hidden_act='gelu' is not supported; known: silu"):
        read(tmp_path, hidden_act="gelu")
    with pytest.raises(ModelFileError, match=r"partial_rotary_factor=1.5 is not legal"):
        read(tmp_path, partial_rotary_factor=1.5)
