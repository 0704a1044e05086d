"""Granite read from its published spelling."""

from __future__ import annotations

from pathlib import Path

from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

GRANITE = LLAMA | {
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
}


def test_the_four_multipliers(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, GRANITE))
    assert (config.embedding_scale, config.attention_scale) == (12.0, 0.0078125)
    assert (config.logits_scale, config.qkv_bias, config.mlp_bias) == (1 / 16, False, False)
    factors = config.residual_factors
    assert (factors.attention.block, factors.feed_forward.block) == (0.22, 0.22)
    assert (factors.attention.residual, factors.feed_forward.residual) == (1.0, 1.0)


def test_biases_of_all_projections_come_together(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, GRANITE, attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)
