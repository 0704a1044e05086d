"""Dense families read from published spellings."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.config.model import LayerKind
from heddle.config.visibility import Visibility
from heddle.errors import ModelFileError
from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config


def test_llama(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, LLAMA))
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, 14336, 32)
    assert (config.vocab_size, config.max_position_embeddings) == (128256, 131072)
    assert (config.rms_norm_eps, config.checkpoint_dtype) == (1e-05, "bfloat16")
    assert (config.bos_token_id, config.eos_token_ids) == (128000, (128001, 128008))
    assert (config.tie_word_embeddings, config.qk_norm, config.qkv_bias) == (False, False, False)
    assert config.layer_kinds == ()
    assert not config.is_mla


def test_llama_biases(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, LLAMA, attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


def test_absent_kv_heads_are_the_query_heads(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, LLAMA, num_key_value_heads=...))
    assert config.num_kv_heads == 32


def test_qwen2_has_biases(tmp_path: Path) -> None:
    qwen2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
    config = load_model_config(write_config(tmp_path, qwen2))
    assert (config.qkv_bias, config.output_bias) == (True, False)


def test_qwen3_has_head_norms_and_its_own_head_width(tmp_path: Path) -> None:
    qwen3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024}
    config = load_model_config(write_config(tmp_path, qwen3))
    assert (config.qk_norm, config.qkv_bias, config.head_dim) == (True, False, 128)
    assert load_model_config(write_config(tmp_path, qwen3, head_dim=64)).head_dim == 64


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("num_key_value_heads", 5, "must divide num_attention_heads=32"),
        ("head_dim", 7, "must be even"),
        ("hidden_size", "4096", "an integer"),
        ("rms_norm_eps", -1.0, "above 0"),
    ],
)
def test_a_wrong_value_names_key_and_rule(
    tmp_path: Path, key: str, value: object, rule: str
) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json: {key}={value!r} .*{rule}"):
        load_model_config(write_config(tmp_path, LLAMA, **{key: value}))


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_value_names_its_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json: {key} is missing"):
        load_model_config(write_config(tmp_path, LLAMA, **{key: ...}))


def window(size: int) -> LayerKind:
    return LayerKind(visibility=Visibility("window", size))


def test_a_window_of_mistral_is_in_every_layer(tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 3}
    config = load_model_config(write_config(tmp_path, mistral, sliding_window=4096))
    assert config.layer_kinds == (window(4096),) * 3
    switched_off = write_config(tmp_path, mistral, sliding_window=None)
    assert load_model_config(switched_off).layer_kinds == ()
    assert load_model_config(write_config(tmp_path, mistral)).layer_kinds == ()


def test_a_window_of_qwen_is_in_the_upper_layers_or_where_the_file_says(tmp_path: Path) -> None:
    qwen2 = LLAMA | {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 3,
        "sliding_window": 64,
        "use_sliding_window": True,
    }
    full = LayerKind()
    rule = load_model_config(write_config(tmp_path, qwen2, max_window_layers=2))
    assert rule.layer_kinds == (full, full, window(64))
    types = ["full_attention", "sliding_attention", "full_attention"]
    listed = load_model_config(write_config(tmp_path, qwen2, layer_types=types))
    assert listed.layer_kinds == (full, window(64), full)
    off = write_config(tmp_path, qwen2, layer_types=types, use_sliding_window=False)
    assert load_model_config(off).layer_kinds == ()
