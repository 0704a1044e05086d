"""GLM-4 (dense) read from its published spelling, old and new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import ModelConfig
from heddle.errors import ModelFileError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

GLM4 = LLAMA | {
    "architectures": ["Glm4ForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, GLM4, **changes))


def test_half_of_a_head_is_rotated_in_pairs_of_neighbours(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.rotary_dim, config.rope.interleaved) == (64, True)
    assert (config.qkv_bias, config.output_bias) == (True, False)
    parameters = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}
    assert read(tmp_path, rope_parameters=parameters).rotary_dim == 32
    assert read(tmp_path, partial_rotary_factor=..., head_dim=...) == config


def test_only_the_later_generation_has_biases_unless_it_says_so(tmp_path: Path) -> None:
    assert read(tmp_path, attention_bias=...).qkv_bias is True
    first = {"architectures": ["GlmForCausalLM"]}
    assert read(tmp_path, **first, attention_bias=...).qkv_bias is False
    assert read(tmp_path, **first).qkv_bias is True


def test_an_odd_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"partial_rotary_factor=0\.2.*even number.*128"):
        read(tmp_path, partial_rotary_factor=0.2)
