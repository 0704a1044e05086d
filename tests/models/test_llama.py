"""The dense family equals transformers, and ranks of a slice project the same kv heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from heddle.comm.base import Communicator
from heddle.config.model import ModelConfig
from heddle.layout.heads import HeadLayout
from heddle.models.base import RowInputs
from heddle.models.config_json import load_model_config
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from tests.support.checkpoints import CPU, head_layout, run_tp
from tests.support.comparison import POSITIONS, TOKEN_IDS, check_against_transformers
from tests.support.rank_attention import HeadMapAttention

Checkpoint = Callable[[str], Path]

MODELS = (
    "llama-8-2",
    "llama-8-1",
    "llama-4-4",
    "llama-9-3",
    "llama-6-2",
    "llama-bias",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-window",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "gpt-oss",
    "glm4-moe",
    "olmoe",
    "minimax-m2",
    "granite",
    "smollm3",
    "phi3",
    "phi3-window",
    "llama-dynamic",
    "olmo2",
    "olmo3",
    "exaone4",
    "glm",
    "glm4",
    "gemma2",
    "gemma3",
    "llama4",
)


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_equals_transformers(checkpoint: Checkpoint, name: str) -> None:
    check_against_transformers(checkpoint(name), name)


def test_far_positions_equal_transformers(checkpoint: Checkpoint) -> None:
    check_against_transformers(checkpoint("qwen3"), "qwen3", POSITIONS + 400_000)


@pytest.mark.parametrize(("tp_size", "slice_size"), [(4, 2), (4, 4), (2, 2)])
def test_ranks_of_a_slice_project_the_same_kv_heads(
    checkpoint: Checkpoint, tp_size: int, slice_size: int
) -> None:
    path = checkpoint("llama-8-2")
    config = load_model_config(path)
    heads = head_layout(config, tp_size, slice_size)

    def body(rank: int, tp: Communicator) -> torch.Tensor:
        part = create_model(config, heads, rank, open_weights(path), torch.float64, CPU, tp)
        spy = KeySpy(config, heads, rank)
        part.forward(RowInputs(TOKEN_IDS, POSITIONS), spy)
        return spy.keys[0]

    keys = run_tp(tp_size, body)
    for rank, key in enumerate(keys):
        assert key.shape[1] == 2 * slice_size // tp_size
        assert torch.equal(key, keys[rank // slice_size * slice_size])


class KeySpy(HeadMapAttention):
    """Keeps the keys of each layer."""

    def __init__(self, config: ModelConfig, heads: HeadLayout, tp_rank: int) -> None:
        super().__init__(config, heads, tp_rank)
        self.keys: list[torch.Tensor] = []

    def gqa(self, layer, query, key, value, sinks=None):  # type: ignore[no-untyped-def]
        self.keys.append(key)
        return super().gqa(layer, query, key, value, sinks)
