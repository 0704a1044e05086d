"""Scales against transformers' own attention modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import RopeConfig
from heddle.models.config_json import load_model_config
from heddle.models.scale import attention_factor, softmax_scale
from tests.support.tiny import tiny_model

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(
    "name",
    ["llama-9-3", "qwen3", "deepseek-v2", "deepseek-v3", "gemma2", "gemma3", "granite", "phi3"],
)
def test_the_softmax_scale_is_that_of_transformers(checkpoint: Checkpoint, name: str) -> None:
    expected = tiny_model(name).model.layers[0].self_attn.scaling
    assert softmax_scale(load_model_config(checkpoint(name))) == pytest.approx(expected, rel=1e-12)


def test_only_a_scaled_rotary_changes_the_scale(checkpoint: Checkpoint) -> None:
    config = load_model_config(checkpoint("deepseek-v3"))
    plain = replace(config, rope=RopeConfig())
    assert softmax_scale(plain) == 1 / math.sqrt(20)
    assert softmax_scale(config) == pytest.approx(
        (0.1 * 0.6 * math.log(4.0) + 1) ** 2 / math.sqrt(20), rel=1e-12
    )


def longrope(**changes: Any) -> RopeConfig:
    return RopeConfig(rope_type="longrope", original_max_position_embeddings=4096, **changes)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeConfig(), 1.0),
        (RopeConfig(rope_type="llama3", factor=8.0), 1.0),
        (RopeConfig(rope_type="yarn", factor=8.0), 0.1 * math.log(8) + 1),
        (RopeConfig(rope_type="yarn", factor=8.0, attention_factor=0.5), 0.5),
        (RopeConfig(rope_type="yarn", factor=8.0, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (RopeConfig(rope_type="yarn", factor=0.5), 1.0),
        (RopeConfig(rope_type="dynamic", factor=8.0), 1.0),
        (longrope(factor=32.0), math.sqrt(1 + 5 / 12)),
        (longrope(factor=1.0), 1.0),
        (longrope(factor=32.0, attention_factor=1.19), 1.19),
    ],
)
def test_attention_factor(rope: RopeConfig, expected: float) -> None:
    assert attention_factor(rope) == pytest.approx(expected, rel=1e-15)
