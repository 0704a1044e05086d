"""gpt-oss read from its published spelling."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.config.model import RopeConfig
from heddle.errors import ModelFileError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def test_gpt_oss(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, GPT_OSS))
    assert (config.has_sinks, config.qkv_bias, config.output_bias) == (True, True, True)
    assert config.head_dim == 64
    assert [kind.visibility.size for kind in config.layer_kinds] == [128, 0, 128, 0]
    assert config.rope == RopeConfig(
        theta=150000.0,
        rope_type="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        truncate=False,
    )
    moe = config.moe
    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_token, moe.shared_width) == (32, 4, 0)
    assert (moe.swiglu_alpha, moe.swiglu_limit) == (1.702, 7.0)
    assert moe.has_router_bias
    assert moe.has_expert_bias


def test_the_rotary_section_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"rope_scaling=None is not legal; the section is req"):
        load_model_config(write_config(tmp_path, GPT_OSS, rope_scaling=...))
