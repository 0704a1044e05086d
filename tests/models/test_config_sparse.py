"""Settings of top-k attention, read or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import DEEPSEEK_V3, write_config

DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}


def test_published_sizes_are_read(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, DEEPSEEK_V32))
    assert config.sparse is not None
    assert (config.sparse.num_heads, config.sparse.head_dim, config.sparse.top_k) == (64, 128, 2048)
    assert (config.stored_row_width, config.stored_key_width, config.partial_width) == (
        704,
        576,
        512,
    )
    assert config.rope.interleaved
    assert not config.sparse.interleaved


def test_dense_layers_may_be_listed(tmp_path: Path) -> None:
    types = ["dense"] * 2 + ["sparse"] * 59
    config = load_model_config(write_config(tmp_path, DEEPSEEK_V32, mlp_layer_types=types))
    assert config.moe is not None
    assert [config.moe.has_experts(layer) for layer in (0, 1, 2, 60)] == [False, False, True, True]


def test_v3_stores_no_index_keys(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, DEEPSEEK_V3))
    assert config.sparse is None
    assert config.stored_row_width == 576


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("index_topk", 0, "at least 1"),
        ("index_head_dim", 32, "at least qk_rope_head_dim=64"),
        ("q_lora_rank", None, "the indexer reads the query latent"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, key: str, value: object, rule: str) -> None:
    with pytest.raises(ModelFileError, match=rf"{key}={value} is not legal; .*{rule}"):
        load_model_config(write_config(tmp_path, DEEPSEEK_V32, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["indexed_attention"] * 60 + ["full_attention"]),
        ("indexer_types", ["full"] * 60 + ["shared"]),
        ("index_topk_pattern", "F" * 60 + "S"),
        ("index_topk_freq", 2),
    ],
)
def test_layers_that_differ_are_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"{key}=.* is not supported"):
        load_model_config(write_config(tmp_path, DEEPSEEK_V32, **{key: value}))
