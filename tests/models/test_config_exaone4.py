"""EXAONE 4 read from its published spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heddle.config.model import LayerKind, ModelConfig
from heddle.config.visibility import Visibility
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

EXAONE4 = LLAMA | {
    "architectures": ["Exaone4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
}
WINDOW, NOPE = LayerKind(visibility=Visibility("window", 4096)), LayerKind(rope="none")


def read(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, EXAONE4, **changes))


def test_full_layers_between_windows_do_not_rotate(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.layer_kinds == (WINDOW, WINDOW, WINDOW, NOPE)
    assert (config.qk_norm, config.qk_width_norm, config.qkv_bias) == (True, False, False)
    assert read(tmp_path, layer_types=..., sliding_window_pattern=4) == config


def test_a_model_without_windows_rotates_everywhere(tmp_path: Path) -> None:
    types = ["full_attention"] * 4
    assert read(tmp_path, sliding_window=None, layer_types=types).layer_kinds == ()
    assert read(tmp_path, layer_types=types).layer_kinds == (NOPE,) * 4
