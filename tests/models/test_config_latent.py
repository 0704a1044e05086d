"""Latent families read from published spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.model_files import DEEPSEEK_V3, write_config

DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "q_lora_rank": None,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
_ABSENT = (
    "first_k_dense_replace",
    "n_group",
    "n_shared_experts",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
)
GLM_FLASH = (
    DEEPSEEK_V3
    | dict.fromkeys(_ABSENT, ...)
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "rope_scaling": None,
    }
)
GLM_5 = GLM_FLASH | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
}


def test_v3(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, DEEPSEEK_V3))
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (128, 1, 192)
    assert (config.stored_key_width, config.partial_width, config.output_head_dim) == (
        576,
        512,
        128,
    )
    assert config.mla is not None
    assert (config.mla.q_lora_rank, config.mla.kv_lora_rank) == (1536, 512)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_experts_per_token) == (256, 8)
    assert (config.moe.num_groups, config.moe.top_k_groups) == (8, 4)
    assert (config.moe.scoring, config.moe.top_k_method) == ("sigmoid", "noaux_tc")
    assert (config.moe.normalize_top_k, config.moe.routed_scaling_factor) == (True, 2.5)
    assert (config.moe.first_dense_layers, config.moe.num_shared_experts) == (3, 1)
    assert (config.rope.rope_type, config.rope.factor, config.rope.interleaved) == (
        "yarn",
        40.0,
        True,
    )


def test_v3_may_split_halves(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, DEEPSEEK_V3, rope_interleave=False))
    assert not config.rope.interleaved


def test_kimi_k2_is_a_v3_whose_code_stays_unread(tmp_path: Path) -> None:
    trap, marker = tmp_path / "configuration_deepseek.py", tmp_path / "it ran"
    trap.write_text(f"open({str(marker)!r}, 'w')")
    config = load_model_config(write_config(tmp_path, KIMI_K2))
    assert not marker.exists()
    assert (config.architecture, config.num_query_heads) == ("DeepseekV3ForCausalLM", 64)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_groups, config.moe.top_k_groups) == (384, 1, 1)
    assert (config.moe.first_dense_layers, config.moe.routed_scaling_factor) == (1, 2.827)


@pytest.mark.parametrize(
    ("base", "first_dense", "scaling"), [(GLM_FLASH, 1, 1.8), (GLM_5, 3, 2.5)], ids=["flash", "5"]
)
def test_glm_states_less_than_v3(
    tmp_path: Path, base: dict[str, Any], first_dense: int, scaling: float
) -> None:
    config = load_model_config(write_config(tmp_path, base))
    assert config.mla is not None
    assert (config.rope.rope_type, config.rope.interleaved) == ("default", True)
    assert config.moe is not None
    assert (config.moe.scoring, config.moe.top_k_method) == ("sigmoid", "noaux_tc")
    assert (config.moe.num_groups, config.moe.top_k_groups) == (1, 1)
    assert (config.moe.num_shared_experts, config.moe.first_dense_layers) == (1, first_dense)
    assert config.moe.routed_scaling_factor == scaling


def test_neighbours_are_pairs_in_the_indexer_of_glm_5_alone(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, GLM_5))
    assert config.sparse is not None
    assert config.sparse.interleaved
    flash = load_model_config(write_config(tmp_path, GLM_FLASH, rope_interleave=False))
    assert (flash.sparse, flash.rope.interleaved) == (None, False)
    for key in ("rope_interleave", "indexer_rope_interleave"):
        with pytest.raises(UnsupportedError, match=f"{key}=False is not supported"):
            load_model_config(write_config(tmp_path, GLM_5, **{key: False}))


def test_v2(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, DEEPSEEK_V2))
    assert config.mla is not None
    assert config.mla.q_lora_rank is None
    assert config.moe is not None
    assert (config.moe.scoring, config.moe.top_k_method) == ("softmax", "group_limited_greedy")
    assert (config.moe.num_groups, config.moe.top_k_groups) == (8, 4)
    greedy = load_model_config(
        write_config(tmp_path, DEEPSEEK_V2, topk_method="greedy", n_group=None, topk_group=None)
    )
    assert greedy.moe is not None
    assert (greedy.moe.num_groups, greedy.moe.top_k_groups) == (1, 1)


def test_a_latent_model_may_be_dense(tmp_path: Path) -> None:
    assert load_model_config(write_config(tmp_path, DEEPSEEK_V2, n_routed_experts=None)).moe is None


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("scoring_func", "softmax", "V3 scores by sigmoid"),
        ("topk_method", "greedy", "known for this architecture: noaux_tc"),
        ("moe_layer_freq", 2, "every layer above the dense ones"),
    ],
)
def test_other_routings_are_refused(tmp_path: Path, key: str, value: object, rule: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{key}={value!r} is not supported; .*{rule}"):
        load_model_config(write_config(tmp_path, DEEPSEEK_V3, **{key: value}))


def test_normalised_v2_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="norm_topk_prob=True"):
        load_model_config(write_config(tmp_path, DEEPSEEK_V2, norm_topk_prob=True))


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("n_group", 7, "must divide n_routed_experts=256"),
        ("topk_group", 9, "at most n_group=8"),
        ("num_experts_per_tok", 300, "at most n_routed_experts=256"),
        ("num_experts_per_tok", 200, "the chosen groups hold 128 experts"),
        ("qk_rope_head_dim", 63, "must be even"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, key: str, value: int, rule: str) -> None:
    with pytest.raises(ModelFileError, match=rf"{key}={value} is not legal; .*{rule}"):
        load_model_config(write_config(tmp_path, DEEPSEEK_V3, **{key: value}))
