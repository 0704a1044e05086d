"""OLMo 2 read from its published spelling."""

from __future__ import annotations

from pathlib import Path

from heddle.models.config_json import load_model_config
from tests.support.model_files import LLAMA, write_config

OLMO2 = LLAMA | {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False}


def test_queries_and_keys_are_normed_over_their_width(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, OLMO2))
    assert (config.qk_width_norm, config.qk_norm, config.qkv_bias) == (True, False, False)
    biased = load_model_config(write_config(tmp_path, OLMO2, attention_bias=True))
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, False)
