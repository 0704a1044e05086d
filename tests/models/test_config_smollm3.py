"""SmolLM3 read from its published spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import LayerKind, ModelConfig
from heddle.config.visibility import Visibility
from heddle.errors import ModelFileError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

SMOLLM3 = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"],
    "num_hidden_layers": 5,
    "no_rope_layers": [1, 1, 1, 0, 1],
    "rope_theta": 5e6,
    "use_sliding_window": False,
}
NOPE, WINDOW = LayerKind(rope="none"), Visibility("window", 64)


def read(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, SMOLLM3, **changes))


def test_smollm3(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.layer_kinds == (LayerKind(),) * 3 + (NOPE, LayerKind())
    assert (config.rope.theta, config.tie_word_embeddings) == (5e6, True)
    assert read(tmp_path, rope_theta=...).rope.theta == 2e6


def test_without_a_list_every_fourth_layer_does_not_rotate(tmp_path: Path) -> None:
    assert read(tmp_path, no_rope_layers=...) == read(tmp_path)
    config = read(tmp_path, no_rope_layers=None, no_rope_layer_interval=2)
    assert [kind.rope for kind in config.layer_kinds][:3] == ["global", "none", "global"]


def test_windows_are_of_layers_without_rotation_unless_listed(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 64}
    kinds = read(tmp_path, **windows).layer_kinds
    assert kinds == (LayerKind(),) * 3 + (LayerKind(rope="none", visibility=WINDOW), LayerKind())
    types = ["sliding_attention"] + ["full_attention"] * 4
    listed = read(tmp_path, **windows, layer_types=types).layer_kinds
    assert listed == (LayerKind(visibility=WINDOW), LayerKind(), LayerKind(), NOPE, LayerKind())


def test_a_short_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no_rope_layers=\[1\] .*num_hidden_layers=5"):
        read(tmp_path, no_rope_layers=[1])
