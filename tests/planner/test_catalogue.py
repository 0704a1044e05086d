"""Shapes of well-known models, held against the number of parameters that their authors state."""

from __future__ import annotations

import json

import pytest

from heddle.planner.catalogue import (
    FOLDER,
    catalogue_folder,
    catalogue_hint,
    catalogue_names,
)
from heddle.planner.weights import rank_weights
from tests.support.planned import catalogue_model, engine_for, settings_for

BILLIONS = {
    "deepseek-r1": 671,
    "deepseek-v3": 671,
    "deepseek-v3.2": 672,
    "glm-4.5": 353,
    "glm-4.5-air": 106.9,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "kimi-k2": 1026,
    "llama-3.1-405b": 405.9,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-4-maverick": 400.7,
    "llama-4-scout": 107.8,
    "mistral-7b": 7.25,
    "mistral-large-123b": 122.6,
    "mistral-nemo-12b": 12.2,
    "mistral-small-24b": 23.6,
    "mixtral-8x22b": 140.6,
    "mixtral-8x7b": 46.7,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.72,
    "qwen3-14b": 14.8,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-coder-480b-a35b": 480.2,
    "qwen3-next-80b-a3b": 79.7,
}
"""Text model alone, without layers that predict further tokens."""


@pytest.mark.parametrize("name", BILLIONS)
def test_a_model_has_the_parameters_that_it_is_known_for(name: str) -> None:
    engine = engine_for(settings_for(name, "B200", 1, memory=4e12), 1)
    counted = rank_weights(engine.resolved, engine.topology, 0).num_bytes / 2e9
    assert counted == pytest.approx(BILLIONS[name], rel=0.01)


def test_names_are_lower_case_with_dashes_and_all_can_be_read() -> None:
    names = catalogue_names()
    assert len(names) >= 30
    assert set(BILLIONS) <= set(names)
    for name in names:
        assert name == name.lower()
        assert "_" not in name
        assert catalogue_model(name).max_position_embeddings >= 32768


def test_a_name_is_found_in_any_case() -> None:
    assert catalogue_folder("DeepSeek-V3") == FOLDER / "deepseek-v3"
    assert catalogue_folder("no-such") is None
    assert catalogue_hint("kimi-k22") == " (nearest: kimi-k2)"
    assert catalogue_hint("zzz") == ""


def test_files_hold_facts_alone() -> None:
    for name in catalogue_names():
        data = json.loads((FOLDER / name / "config.json").read_text())
        assert "auto_map" not in data
        assert data["torch_dtype"] == "bfloat16"
