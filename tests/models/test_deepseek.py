"""The latent family equals transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from heddle.models.base import RowInputs
from tests.support.checkpoints import solo_model
from tests.support.comparison import POSITIONS, TOKEN_IDS, check_against_transformers
from tests.support.tiny import TINY_NAMES, DenseAttention

Checkpoint = Callable[[str], Path]

LATENT_MODELS = [
    name for name in TINY_NAMES if name.startswith(("deepseek", "glm4-moe-lite", "glm5"))
]


@pytest.mark.parametrize("name", LATENT_MODELS)
def test_one_rank_equals_transformers(checkpoint: Checkpoint, name: str) -> None:
    check_against_transformers(checkpoint(name), name)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe", "glm4-moe-lite", "glm5"])
def test_draft_layers_are_left_alone(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint(name)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (model, config), rows = solo_model(tmp_path), RowInputs(TOKEN_IDS, POSITIONS)
    with torch.inference_mode():
        assert model.forward(rows, DenseAttention(config)).isfinite().all()
