"""One prompt for every tiny model, and the bound of a float32 comparison."""

from __future__ import annotations

from pathlib import Path

import torch

from heddle.models.base import RowInputs
from tests.support.checkpoints import solo_model
from tests.support.tiny import VOCAB_SIZE, DenseAttention, tiny_model

NUM_ROWS = 37
TOKEN_IDS = torch.arange(NUM_ROWS) * 29 % VOCAB_SIZE
POSITIONS = torch.arange(NUM_ROWS)


def tolerance(reference: torch.Tensor) -> float:
    """`1e-4`, or `1e-5` of the largest reference logit."""
    return max(1e-4, 1e-5 * reference.abs().max().item())


def check_against_transformers(path: Path, name: str, positions: torch.Tensor = POSITIONS) -> None:
    """Logits of a checkpoint equal those of transformers on the same weights."""
    model, config = solo_model(path)
    rows = RowInputs(TOKEN_IDS, positions, torch.full_like(positions, int(positions.max()) + 1))
    with torch.inference_mode():
        expected = tiny_model(name)(TOKEN_IDS[None], position_ids=positions[None]).logits[0]
        found = model.logits(model.forward(rows, DenseAttention(config)))
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= tolerance(expected)
