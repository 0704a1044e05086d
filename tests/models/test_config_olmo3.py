"""OLMo 3 read from its published spelling, and from the newer one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import LayerKind, ModelConfig, RopeConfig
from heddle.config.visibility import Visibility
from heddle.errors import UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2,
}
OLMO3 = LLAMA | {
    "architectures": ["Olmo3ForCausalLM"],
    "num_hidden_layers": 5,
    "sliding_window": 4096,
    "rope_scaling": YARN,
}
WINDOW = LayerKind(visibility=Visibility("window", 4096), rope="local")


def read(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, OLMO3, **changes))


def test_only_full_layers_are_stretched(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.layer_kinds == (WINDOW, WINDOW, WINDOW, LayerKind(), WINDOW)
    assert (config.rope.rope_type, config.rope.factor, config.rope.theta) == ("yarn", 8.0, 5e5)
    assert config.local_rope == RopeConfig(theta=5e5)
    assert config.qk_width_norm


def test_the_newer_spelling_means_the_same(tmp_path: Path) -> None:
    sections = {
        "full_attention": YARN | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default"},
    }
    newer = {"rope_parameters": sections, "rope_scaling": ..., "rope_theta": ...}
    assert read(tmp_path, **newer) == read(tmp_path)


def test_settings_outside_of_the_sections_are_refused(tmp_path: Path) -> None:
    flat = YARN | {"rope_theta": 1e6}
    with pytest.raises(UnsupportedError, match="each type of layer must have a section"):
        read(tmp_path, rope_parameters=flat, rope_scaling=..., rope_theta=...)
    sections = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(UnsupportedError, match=r"rope_theta=1000000\.0 is not supported"):
        read(tmp_path, rope_parameters=sections, rope_scaling=..., rope_theta=1e6)
