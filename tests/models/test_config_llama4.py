"""Llama 4 (text) read from its published spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import LayerKind, ModelConfig, TemperatureConfig
from heddle.config.visibility import Visibility
from heddle.errors import ModelFileError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

LLAMA4 = LLAMA | {
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 5,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 1024,
    "no_rope_layers": [],
}
CHUNK, NOPE = LayerKind(visibility=Visibility("chunk", 1024)), LayerKind(rope="none")


def read(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, LLAMA4, **changes))


def test_llama4(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.layer_kinds == (CHUNK, CHUNK, CHUNK, NOPE, CHUNK)
    assert (config.intermediate_size, config.rope.interleaved) == (16384, True)
    assert (config.qk_l2_norm, config.qk_norm) == (True, False)
    assert config.temperature == TemperatureConfig(floor=8192, scale=0.1)
    moe = config.moe
    assert moe is not None
    assert [layer for layer in range(5) if moe.has_experts(layer)] == [1, 3]
    assert (moe.expert_intermediate_size, moe.shared_width) == (8192, 8192)
    assert (moe.scoring, moe.scales_input, moe.normalize_top_k) == ("sigmoid", True, False)


def test_lists_go_before_rules(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        no_rope_layers=[0, 1, 1, 1, 1],
        layer_types=["full_attention"] * 4 + ["chunked_attention"],
        moe_layers=[],
        attn_temperature_tuning=False,
    )
    assert config.layer_kinds == (NOPE, LayerKind(), LayerKind(), LayerKind(), CHUNK)
    assert config.moe is not None
    assert not any(config.moe.has_experts(layer) for layer in range(5))
    assert config.temperature is None


def test_a_short_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no_rope_layers=\[1\] .*num_hidden_layers=5"):
        read(tmp_path, no_rope_layers=[1])
