"""A layout that gives other numbers does not become ready."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heddle import LLM
from heddle.config import EngineConfig
from heddle.engine.args import engine_config
from heddle.errors import NumericsError
from heddle.server.self_check import check_layout, why_skipped
from tests.support.tiny import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), "llama-8-2")


def config_of(folder: Path, **changes: object) -> EngineConfig:
    settings = {"executor": "threads", "num_gpu_blocks_override": 100, "block_size": 4, **changes}
    return engine_config(str(folder), **settings)


LAYOUTS = [
    {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"prefill_context_parallel_size": 3},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_layout_is_within_rounding(folder: Path, layout: dict[str, int]) -> None:
    config = config_of(folder, **layout)
    with LLM.from_config(config) as llm:
        assert why_skipped(config, llm, "on") == ""
        assert 0 <= check_layout(config, llm) < 1e-3
        assert llm.get_metrics()["requests_length"] == 3


def test_a_rank_with_other_weights_is_found(folder: Path) -> None:
    config = config_of(folder, tensor_parallel_size=2)
    with LLM.from_config(config) as llm:
        worker = llm.driver._executor.workers[1]  # type: ignore[attr-defined]
        with torch.inference_mode():
            worker.model._layers[0].attention_norm.weight.mul_(1.05)
        with pytest.raises(NumericsError, match="does not give one rank"):
            check_layout(config, llm)


def test_reasons_for_no_check(folder: Path) -> None:
    one = config_of(folder)
    with LLM.from_config(one) as llm:
        assert "one rank" in why_skipped(one, llm, "on")
    two = config_of(folder, tensor_parallel_size=2)
    with LLM.from_config(two) as llm:
        assert why_skipped(two, llm, "auto") == ""
        assert "off" in why_skipped(two, llm, "off")
    narrow = config_of(folder, tensor_parallel_size=2, kv_cache_dtype="int8")
    with LLM.from_config(narrow) as llm:
        assert "heddle verify" in why_skipped(narrow, llm, "on")
