"""Phi-3 and Phi-4 read from their published spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import LayerKind, ModelConfig
from heddle.config.visibility import Visibility
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

PHI4_MINI = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [1.0 + pair for pair in range(48)],
    },
    "sliding_window": 262144,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, PHI4_MINI, **changes))


def test_phi4_mini(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.head_dim, config.rotary_dim, config.layer_kinds) == (128, 96, ())
    rope = config.rope
    assert (rope.rope_type, rope.factor) == ("longrope", 32.0)
    assert rope.original_max_position_embeddings == 4096
    assert (rope.short_factor[47], rope.long_factor[47]) == (1.0, 48.0)


def test_a_window_that_a_sequence_can_reach_is_one_of_every_layer(tmp_path: Path) -> None:
    changes = {"rope_scaling": None, "max_position_embeddings": 4096, "sliding_window": 2047}
    config = read(tmp_path, **changes, num_hidden_layers=2, partial_rotary_factor=1.0)
    assert config.layer_kinds == (LayerKind(visibility=Visibility("window", 2047)),) * 2
    assert (config.rope.rope_type, config.rotary_dim) == ("default", 128)


def test_what_the_published_code_reads_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"rope_scaling=.*'yarn'.*known in Phi-3"):
        read(tmp_path, rope_scaling={"type": "yarn", "factor": 2.0})
    with pytest.raises(ModelFileError, match=r"original_max_position_embeddings=None.*top level"):
        read(tmp_path, original_max_position_embeddings=...)
    with pytest.raises(ModelFileError, match=r"rope_scaling\.short_factor=.*rotary pair.*, 32"):
        read(tmp_path, partial_rotary_factor=0.5)
