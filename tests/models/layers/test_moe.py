"""Experts behind a router, cut over ranks, add up to a loop over rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heddle.comm.solo import SoloCommunicator
from heddle.config.model import MoEConfig
from heddle.models.layers.moe import QWEN_NAMES, load_moe, visits
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU
from tests.support.experts import V2, V3, WIDTH, feed_forward, mixture_row, random_tensors

GATED = replace(V2, num_shared_experts=0, shared_intermediate_size=3, has_shared_gate=True)
ENTERING = replace(V2, scoring="sigmoid", scales_input=True)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("config", [V2, V3], ids=["v2", "v3"])
def test_cut_experts_add_up_to_a_loop_over_rows(config: MoEConfig, size: int) -> None:
    tensors = random_tensors(config, torch.float64)
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    total = torch.zeros_like(x)
    for rank in range(size):
        loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
        block = load_moe(loader, Shard(rank, size, SoloCommunicator()), "m", WIDTH, config)
        loader.finish()
        total += block(x)
        experts, weights = block.router(x)
    visited = set(experts.flatten().tolist())
    assert len(visited) > 2
    for row in range(len(x)):
        expected = mixture_row(tensors, x[row], experts[row].tolist(), weights[row])
        assert (total[row] - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1)


def test_no_rows_give_no_rows() -> None:
    loader = WeightLoader(MemorySource(random_tensors(V3, torch.float64)), torch.float64, CPU)
    block = load_moe(loader, Shard(0, 1, SoloCommunicator()), "m", WIDTH, V3)
    assert block(torch.zeros(0, WIDTH, dtype=torch.float64)).shape == (0, WIDTH)


def test_a_shared_gate_weighs_each_row() -> None:
    tensors = random_tensors(V2, torch.float64)
    for side, shape in (("gate", (3, WIDTH)), ("up", (3, WIDTH)), ("down", (WIDTH, 3))):
        del tensors[f"m.shared_experts.{side}_proj.weight"]
        tensors[f"m.shared_expert.{side}_proj.weight"] = torch.randn(shape, dtype=torch.float64)
    tensors["m.shared_expert_gate.weight"] = torch.randn(1, WIDTH, dtype=torch.float64)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    total = torch.zeros_like(x)
    for rank in range(2):
        loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
        shard = Shard(rank, 2, SoloCommunicator())
        block = load_moe(loader, shard, "m", WIDTH, GATED, QWEN_NAMES)
        loader.finish()
        total += block(x)
    experts, weights = block.router(x)
    for row in range(len(x)):
        gate = 1 / (1 + (-(tensors["m.shared_expert_gate.weight"][0] @ x[row])).exp())
        expected = gate * feed_forward(tensors, "m.shared_expert", x[row])
        for expert, weight in zip(experts[row].tolist(), weights[row], strict=True):
            expected = expected + weight * feed_forward(tensors, f"m.experts.{expert}", x[row])
        assert (total[row] - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1)


def test_a_weight_may_multiply_what_enters() -> None:
    tensors = random_tensors(ENTERING, torch.float64)
    loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
    block = load_moe(loader, Shard(0, 1, SoloCommunicator()), "m", WIDTH, ENTERING)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    found = block(x)
    experts, weights = block.router(x)
    for row in range(len(x)):
        expected = feed_forward(tensors, "m.shared_experts", x[row])
        for expert, weight in zip(experts[row].tolist(), weights[row], strict=True):
            expected = expected + feed_forward(tensors, f"m.experts.{expert}", weight * x[row])
        assert (found[row] - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1)


def test_each_visit_is_made_once_and_rows_ascend() -> None:
    experts = torch.tensor([[2, 0], [0, 2], [2, 4]])
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    found = [(i, rows.tolist(), w.tolist()) for i, rows, w in visits(experts, weights, 6)]
    assert found == [(0, [0, 1], [2.0, 3.0]), (2, [0, 1, 2], [1.0, 4.0, 5.0]), (4, [2], [6.0])]
