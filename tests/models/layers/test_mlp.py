"""The gated block equals its definition, whole and in parts."""

from __future__ import annotations

import pytest
import torch

from heddle.comm.solo import SoloCommunicator
from heddle.models.layers.mlp import load_mlp
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_of_all_ranks_add_up(size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    gate, up, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((10, 6), (10, 6), (6, 10))
    )
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    inner = x @ gate.T
    expected = (inner / (1 + (-inner).exp()) * (x @ up.T)) @ down.T
    tensors = {"m.gate_proj.weight": gate, "m.up_proj.weight": up, "m.down_proj.weight": down}
    total = torch.zeros(5, 6, dtype=torch.float64)
    for rank in range(size):
        loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
        total += load_mlp(loader, Shard(rank, size, SoloCommunicator()), "m", 6, 10)(x)
        loader.finish()
    assert (total - expected).abs().max() <= 1e-12 * expected.abs().max()
