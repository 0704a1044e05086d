"""Recurrent families read from published spellings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import Factors
from heddle.config.visibility import Visibility
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

QWEN3_NEXT: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 64,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 500,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
BAMBA: dict[str, Any] = LLAMA | {
    "architectures": ["BambaForCausalLM"],
    "num_hidden_layers": 6,
    "attn_layer_indices": [2, 4],
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_d_head": 64,
}
MINIMAX: dict[str, Any] = LLAMA | {
    "architectures": ["MiniMaxForCausalLM"],
    "num_hidden_layers": 4,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "block_size": 256,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_attn_alpha_factor": 3.5565588200778455,
    "linear_attn_beta_factor": 1.0,
    "mlp_alpha_factor": 2,
}


def mixers(path: Path) -> str:
    config = load_model_config(path)
    return "".join(config.kind_of(layer).mixer[0] for layer in range(config.num_layers))


def test_qwen3_next(tmp_path: Path) -> None:
    path = write_config(tmp_path, QWEN3_NEXT)
    config = load_model_config(path)
    assert mixers(path) == "rrrarrra"
    assert (config.head_dim, config.rotary_dim, config.qk_norm) == (256, 64, True)
    recurrent = config.recurrent
    assert recurrent is not None
    assert (recurrent.method, recurrent.num_heads, recurrent.num_key_heads) == (
        "gated_delta",
        32,
        16,
    )
    assert (recurrent.key_dim, recurrent.value_dim, recurrent.conv_kernel) == (128, 64, 4)
    assert recurrent.norm_groups == 32
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.shared_width) == (512, 500)
    assert config.moe.has_shared_gate
    assert all(config.moe.has_experts(layer) for layer in range(8))


def test_a_share_beside_the_rotary_settings_and_a_list_of_types(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        QWEN3_NEXT,
        partial_rotary_factor=...,
        rope_theta=...,
        rope_parameters={
            "rope_theta": 5e6,
            "rope_type": "default",
            "partial_rotary_factor": 0.5,
        },
        layer_types=["full_attention"] + ["linear_attention"] * 7,
        num_experts=0,
    )
    config = load_model_config(path)
    assert (config.rotary_dim, config.rope.theta, config.moe) == (128, 5e6, None)
    assert mixers(path) == "arrrrrrr"


def test_bamba(tmp_path: Path) -> None:
    path = write_config(tmp_path, BAMBA)
    config = load_model_config(path)
    assert mixers(path) == "rrarar"
    assert (config.head_dim, config.rotary_dim) == (128, 64)
    recurrent = config.recurrent
    assert recurrent is not None
    assert (recurrent.method, recurrent.num_heads, recurrent.num_key_heads) == ("mamba2", 128, 1)
    assert (recurrent.key_dim, recurrent.value_dim, recurrent.chunk_size) == (256, 64, 256)
    assert (recurrent.has_conv_bias, recurrent.has_projection_bias) == (True, False)
    assert recurrent.time_step_limit == (0.0, math.inf)
    limited = write_config(tmp_path, BAMBA, time_step_limit=[0.01, math.inf])
    found = load_model_config(limited).recurrent
    assert found is not None
    assert found.time_step_limit == (0.01, math.inf)


def test_minimax(tmp_path: Path) -> None:
    path = write_config(tmp_path, MINIMAX, rope_theta=...)
    config = load_model_config(path)
    assert mixers(path) == "rara"
    assert config.rope.theta == 1e6
    recurrent = config.recurrent
    assert recurrent is not None
    assert (recurrent.method, recurrent.num_heads, recurrent.key_dim) == ("lightning", 32, 128)
    assert (recurrent.conv_kernel, recurrent.norm_groups, recurrent.chunk_size) == (0, 1, 256)
    factors = config.residual_factors
    assert factors.recurrent == Factors(residual=3.5565588200778455)
    assert factors.attention == Factors()
    assert factors.feed_forward == Factors(residual=2)
    assert config.moe is not None
    assert config.moe.expert_intermediate_size == 14336


def test_a_window_of_minimax_is_of_its_attention_layers(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, MINIMAX, sliding_window=64))
    assert config.kind_of(1).visibility == Visibility("window", 64)
    assert config.kind_of(0).mixer == "recurrent"


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN3_NEXT, {"linear_num_key_heads": 5}, "must divide linear_num_value_heads=32"),
        (QWEN3_NEXT, {"linear_conv_kernel_dim": 1}, "an integer of at least 2"),
        (QWEN3_NEXT, {"partial_rotary_factor": 1.5}, "an even number of elements of a head, 256"),
        (QWEN3_NEXT, {"partial_rotary_factor": 0.004}, "an even number of elements"),
        (BAMBA, {"mamba_n_heads": 100}, "must divide the inner width 8192"),
        (BAMBA, {"mamba_n_groups": 3}, "must divide mamba_n_heads=128"),
        (BAMBA, {"time_step_limit": [1.0, 0.5]}, "two numbers were expected"),
        (BAMBA, {"time_step_limit": [1.0]}, "two numbers were expected"),
        (BAMBA, {"head_dim": 6}, "a quarter of the head width 6"),
    ],
)
def test_illegal_values_are_named(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_model_config(write_config(tmp_path, base, **changes))


def test_an_unknown_layer_type_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, MINIMAX, layer_types=["linear_attention", "mamba"] * 2)
    with pytest.raises(UnsupportedError, match="mamba is not known here"):
        load_model_config(path)
