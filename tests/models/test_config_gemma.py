"""Gemma 2 and 3 read from published spellings, old and new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import ModelConfig, RopeConfig
from heddle.errors import UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

GEMMA2 = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_size": 2304,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 224,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
}
GEMMA3 = GEMMA2 | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 20000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


def read(folder: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, base, **changes))


def sizes(config: ModelConfig) -> list[int]:
    return [kind.visibility.size for kind in config.layer_kinds]


def test_gemma2(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA2)
    assert sizes(config) == [4096, 0, 4096, 0]
    assert {kind.rope for kind in config.layer_kinds} == {"global"}
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    assert config.attention_scale == pytest.approx(224**-0.5, rel=1e-15)
    assert config.embedding_scale == pytest.approx(48.0)
    assert (config.activation, config.head_dim, config.qk_norm) == ("gelu_tanh", 256, False)
    assert config.tie_word_embeddings  # where the file does not say


def test_gemma3_in_the_old_and_the_new_spelling(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3)
    assert sizes(config) == [512, 512, 0, 512, 512, 0, 512]
    assert [kind.rope for kind in config.layer_kinds][:3] == ["local", "local", "global"]
    assert config.rope == RopeConfig(theta=1e6, rope_type="linear", factor=8.0)
    assert config.local_rope == RopeConfig(theta=2e4)
    assert (config.qk_norm, config.attention_softcap, config.final_softcap) == (True, 0.0, 0.0)
    sections = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    old = {"rope_theta": ..., "rope_local_base_freq": ..., "rope_scaling": ...}
    assert read(tmp_path, GEMMA3, rope_parameters=sections, **old) == config
    absent = read(tmp_path, GEMMA3, **old)
    assert (absent.rope, absent.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (GEMMA2, "hidden_activation", "gelu"),
        (GEMMA3, "use_bidirectional_attention", True),
        (GEMMA3, "attn_logit_softcapping", 50.0),
    ],
)
def test_what_is_not_built_is_refused(
    tmp_path: Path, base: dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(UnsupportedError, match=rf"{key}={value!r} is not supported"):
        read(tmp_path, base, **{key: value})
