"""MiniMax-M2 read from its published spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import ModelConfig
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import write_config

M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, M2, **changes))


def test_published_settings(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (48, 8, 128)
    assert (config.rotary_dim, config.rope.theta, config.rope.interleaved) == (64, 5e6, False)
    assert (config.qk_width_norm, config.qk_norm, config.qkv_bias) == (True, False, False)
    assert config.moe is not None
    assert (config.moe.scoring, config.moe.top_k_method) == ("sigmoid", "noaux_tc")
    assert (config.moe.num_experts, config.moe.num_experts_per_token) == (256, 8)
    assert (config.moe.expert_intermediate_size, config.moe.normalize_top_k) == (1536, True)
    assert config.moe.shared_width == 0


def test_the_part_that_turns_may_be_a_share(tmp_path: Path) -> None:
    assert read(tmp_path, rotary_dim=..., partial_rotary_factor=0.25).rotary_dim == 32
    assert read(tmp_path, rotary_dim=...).rotary_dim == 128
    for width in (63, 130):
        with pytest.raises(ModelFileError, match=f"rotary_dim={width} .* up to head_dim=128"):
            read(tmp_path, rotary_dim=width)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("qk_norm_type", "per_head"),
        ("use_qk_norm", False),
        ("use_routing_bias", False),
        ("shared_intermediate_size", 512),
        ("attn_type_list", [0, 1]),
    ],
)
def test_what_the_reference_does_not_have_is_refused(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(UnsupportedError, match=f"{key}=.* is not supported"):
        read(tmp_path, **{key: value})
