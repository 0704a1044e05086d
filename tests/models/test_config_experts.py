"""Mixtures read from published spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import LayerKind, ModelConfig, MoEConfig
from heddle.config.visibility import Visibility
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "head_dim": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
QWEN2 = QWEN3 | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
}


OLMOE = LLAMA | {
    "architectures": ["OlmoeForCausalLM"],
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "clip_qkv": None,
    "norm_topk_prob": False,
}


def read(folder: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, base, **changes))


def moe_of(config: ModelConfig) -> MoEConfig:
    assert config.moe is not None
    return config.moe


def test_mixtral(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTRAL)
    moe = moe_of(config)
    assert (moe.num_experts, moe.num_experts_per_token) == (8, 2)
    assert (moe.expert_intermediate_size, moe.shared_width) == (14336, 0)
    assert (moe.scoring, moe.normalize_top_k) == ("softmax", True)
    assert all(moe.has_experts(layer) for layer in range(config.num_layers))
    assert config.layer_kinds == ()
    assert read(tmp_path, MIXTRAL, rope_theta=...).rope.theta == 1e6


def test_qwen3_has_head_norms_and_no_shared_expert(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3)
    moe = moe_of(config)
    assert (config.qk_norm, config.qkv_bias, config.head_dim) == (True, False, 64)
    assert (moe.num_experts, moe.expert_intermediate_size, moe.normalize_top_k) == (128, 768, True)
    assert (moe.shared_width, moe.has_shared_gate) == (0, False)
    newer = read(tmp_path, QWEN3, num_experts=..., num_local_experts=16)
    assert moe_of(newer).num_experts == 16


def test_qwen2_has_biases_and_a_gated_shared_expert(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN2)
    moe = moe_of(config)
    assert (config.qk_norm, config.qkv_bias, config.output_bias) == (False, True, False)
    assert (moe.shared_width, moe.has_shared_gate, moe.normalize_top_k) == (5632, True, False)
    assert read(tmp_path, QWEN2, qkv_bias=False).qkv_bias is False


def test_olmoe_norms_whole_queries_and_keys(tmp_path: Path) -> None:
    config = read(tmp_path, OLMOE)
    moe = moe_of(config)
    assert (config.qk_width_norm, config.qk_norm, config.qkv_bias) == (True, False, False)
    assert (moe.num_experts, moe.num_experts_per_token) == (64, 8)
    assert (moe.expert_intermediate_size, moe.shared_width) == (14336, 0)
    assert (moe.scoring, moe.normalize_top_k) == ("softmax", False)
    biased = read(tmp_path, OLMOE, attention_bias=True)
    assert (biased.qkv_bias, biased.output_bias) == (True, True)
    with pytest.raises(UnsupportedError, match=r"clip_qkv=8\.0 is not supported"):
        read(tmp_path, OLMOE, clip_qkv=8.0)


def test_dense_layers_are_listed_or_left_out_by_a_step(tmp_path: Path) -> None:
    moe = moe_of(read(tmp_path, QWEN3, decoder_sparse_step=3, mlp_only_layers=[2]))
    assert [layer for layer in range(6) if moe.has_experts(layer)] == [5]


def test_windows(tmp_path: Path) -> None:
    window, full = LayerKind(visibility=Visibility("window", 64)), LayerKind()
    on = {"use_sliding_window": True, "sliding_window": 64}
    assert read(tmp_path, QWEN3, **on).layer_kinds == (window,) * 6
    alternating = read(tmp_path, QWEN2, **on, max_window_layers=4).layer_kinds
    assert alternating == (window, full, window, full, full, full)
    assert read(tmp_path, QWEN2, sliding_window=64).layer_kinds == ()
    assert set(read(tmp_path, MIXTRAL, sliding_window=64).layer_kinds) == {window}


def test_more_experts_per_row_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"num_experts_per_tok=9 .*num_local_experts=8"):
        read(tmp_path, MIXTRAL, num_experts_per_tok=9)
