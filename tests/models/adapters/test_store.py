"""Adapters that PEFT wrote give what PEFT makes of them, in every kind of block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from heddle.attention.adapter_rows import AdapterRows
from heddle.comm.solo import SoloCommunicator
from heddle.models.adapters.slots import AdapterSlots
from heddle.models.adapters.store import AdapterStore
from heddle.models.base import RowInputs
from heddle.models.config_json import load_model_config
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from tests.support.adapters import linear_modules, peft_model, write_adapter
from tests.support.checkpoints import CPU, head_layout
from tests.support.comparison import NUM_ROWS, POSITIONS, TOKEN_IDS, tolerance
from tests.support.tiny import DenseAttention, build_tiny

NO_TARGETS = (
    *("kv_b_proj", "in_proj", "in_proj_qkvz", "in_proj_ba"),
    *("shared_expert_gate", "router", "gate"),
)
DEFAULT = ("llama-bias", "phi3-window", "deepseek-v3", "qwen3-next")
MORE = (
    "bamba",
    "glm4",
    "llama4",
    "qwen2-moe",
    "qwen3",
    "gemma2",
    "gpt-oss",
    "mixtral",
    "olmo2",
    "granite",
    "deepseek-v2",
    "minimax-m2",
)
SPLIT_EXPERTS = ("deepseek-v3", "deepseek-v2", "qwen3-next")
"""Here PEFT takes the names of feed-forward modules for those of its experts."""


@pytest.mark.parametrize(
    "name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_logits_equal_those_of_peft(tmp_path: Path, name: str) -> None:
    modules = [
        module
        for module in linear_modules(name)
        if module.rpartition(".")[2] not in NO_TARGETS
        and not (name in SPLIT_EXPERTS and ".mlp." in module)
    ]
    folder = write_adapter(tmp_path / "adapter", name, modules, seed=1)
    path = build_tiny(tmp_path, name)
    plain, found = plain_and_adapted(path, folder, torch.float32)
    _, exact = plain_and_adapted(path, folder, torch.float64)
    with torch.inference_mode():
        expected = peft_model(name, modules, seed=1)(TOKEN_IDS[None]).logits[0]
    # Recurrences amplify rounding, on some processors more: theirs may be off as far as ours is.
    rounding = (found - exact).abs().max().item()
    assert rounding < 1e-4 * exact.abs().max()
    assert (exact - expected).abs().max() <= max(tolerance(expected), 3 * rounding)
    assert (found - plain).abs().max() > 1


def plain_and_adapted(
    path: Path, folder: Path, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits without and with an adapter; without it again they are what they were."""
    config, slots = load_model_config(path), list[AdapterSlots]()
    model = create_model(
        config,
        head_layout(config),
        0,
        open_weights(path),
        dtype,
        CPU,
        SoloCommunicator(),
        adapter_slots=slots,
    )
    store, ops = AdapterStore(slots, dtype, CPU), DenseAttention(config)

    def logits() -> torch.Tensor:
        return model.logits(model.forward(RowInputs(TOKEN_IDS, POSITIONS), ops))

    with torch.inference_mode():
        plain = logits()
        store.change(3, str(folder))
        ops.adapters = AdapterRows.of(np.full(NUM_ROWS, 3))
        found = logits()
        store.change(3, None)
        assert torch.equal(logits(), plain)
    return plain, found
