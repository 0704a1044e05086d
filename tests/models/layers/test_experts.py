"""Experts equal their definition, whole and in parts, however the checkpoint stores them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heddle.comm.base import World
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup
from heddle.config.model import MoEConfig
from heddle.errors import ModelFileError
from heddle.models.layers.expert_group import ExpertGroup, ExpertLoad
from heddle.models.layers.experts import (
    ExpertStorage,
    ExpertWeights,
    FusedExperts,
    SeparateExperts,
    load_experts,
)
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU

EXPERTS, WIDTH, INNER = 3, 4, 7
PLAIN = MoEConfig(
    num_experts=EXPERTS,
    num_experts_per_token=1,
    expert_intermediate_size=INNER,
    scoring="softmax",
    normalize_top_k=False,
)
CLAMPED = replace(PLAIN, has_expert_bias=True, swiglu_limit=0.7, swiglu_alpha=1.3)
GENERATOR = torch.Generator().manual_seed(3)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


GATE, UP = random(EXPERTS, WIDTH, INNER), random(EXPERTS, WIDTH, INNER)
DOWN = random(EXPERTS, INNER, WIDTH)
GATE_BIAS, UP_BIAS, DOWN_BIAS = (
    random(EXPERTS, INNER),
    random(EXPERTS, INNER),
    random(EXPERTS, WIDTH),
)
ROWS = random(6, WIDTH)


def parts(
    tensors: dict[str, torch.Tensor], config: MoEConfig, storage: ExpertStorage, size: int
) -> list[ExpertWeights]:
    """What each of `size` ranks loads."""
    found = []
    for rank in range(size):
        loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
        shard = Shard(rank, size, SoloCommunicator())
        found.append(load_experts(loader, shard, "e", WIDTH, config, storage))
        loader.finish()
    return found


def check(experts: list[ExpertWeights], expected: torch.Tensor) -> None:
    """`[X, 6, WIDTH]`: ranks add up."""
    assert all(part.num_experts == EXPERTS for part in experts)
    for expert in range(EXPERTS):
        total = sum(part.run(ROWS, expert) for part in experts)
        assert (total - expected[expert]).abs().max() < 1e-12


def plain() -> torch.Tensor:
    gate = ROWS @ GATE
    return (gate / (1 + (-gate).exp()) * (ROWS @ UP)) @ DOWN


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_separate_matrices(size: int, names: tuple[str, str, str]) -> None:
    tensors = {
        f"e.{expert}.{name}.weight": stored[expert].T.contiguous()
        for name, stored in zip(names, (GATE, UP, DOWN), strict=True)
        for expert in range(EXPERTS)
    }
    check(parts(tensors, PLAIN, SeparateExperts(*names), size), plain())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fused_with_the_gate_first(size: int) -> None:
    tensors = {"e.gate_up_proj": torch.cat([GATE, UP], dim=-1), "e.down_proj": DOWN}
    check(parts(tensors, PLAIN, FusedExperts(interleaved=False), size), plain())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fused_alternating_clamped_and_biased(size: int) -> None:
    tensors = {
        "e.gate_up_proj": torch.stack([GATE, UP], dim=-1).flatten(-2),
        "e.gate_up_proj_bias": torch.stack([GATE_BIAS, UP_BIAS], dim=-1).flatten(-2),
        "e.down_proj": DOWN,
        "e.down_proj_bias": DOWN_BIAS,
    }
    gate = (ROWS @ GATE + GATE_BIAS[:, None]).clamp(max=0.7)
    up = (ROWS @ UP + UP_BIAS[:, None]).clamp(-0.7, 0.7)
    assert (gate == 0.7).any()
    assert (up == -0.7).any()
    expected = ((up + 1) * gate / (1 + (-1.3 * gate).exp())) @ DOWN + DOWN_BIAS[:, None]
    check(parts(tensors, CLAMPED, FusedExperts(interleaved=True), size), expected)


def whole(
    tensors: dict[str, torch.Tensor], config: MoEConfig, storage: ExpertStorage, size: int
) -> list[ExpertWeights]:
    """What each of `size` ranks loads that hold whole experts."""

    def body(world: World) -> ExpertWeights:
        ep = world.group("ep", [range(size)])
        group = ExpertGroup(ep, SoloCommunicator(), ExpertLoad(EXPERTS))
        loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
        shard = Shard(world.global_rank, size, SoloCommunicator(), group)
        experts = load_experts(loader, shard, "e", WIDTH, config, storage)
        loader.finish()
        return experts

    return ThreadGroup(size).run(body)


def separate_tensors() -> dict[str, torch.Tensor]:
    return {
        f"e.{expert}.{name}_proj.weight": stored[expert].T.contiguous()
        for name, stored in (("gate", GATE), ("up", UP), ("down", DOWN))
        for expert in range(EXPERTS)
    }


@pytest.mark.parametrize("size", [2, 3, 4])
def test_whole_experts_lie_on_one_rank_each(size: int) -> None:
    fused = {
        "e.gate_up_proj": torch.stack([GATE, UP], dim=-1).flatten(-2),
        "e.gate_up_proj_bias": torch.stack([GATE_BIAS, UP_BIAS], dim=-1).flatten(-2),
        "e.down_proj": DOWN,
        "e.down_proj_bias": DOWN_BIAS,
    }
    clamped = whole(fused, CLAMPED, FusedExperts(interleaved=True), size)
    separate = whole(separate_tensors(), PLAIN, SeparateExperts(), size)
    (alone,) = parts(fused, CLAMPED, FusedExperts(interleaved=True), 1)
    holders = [[part.holds(expert) for part in separate].index(True) for expert in range(EXPERTS)]
    assert holders == {2: [0, 1, 1], 3: [0, 1, 2], 4: [1, 2, 3]}[size]
    for expert, rank in enumerate(holders):
        assert [part.holds(expert) for part in clamped].count(True) == 1
        assert (separate[rank].run(ROWS, expert) - plain()[expert]).abs().max() < 1e-12
        difference = clamped[rank].run(ROWS, expert) - alone.run(ROWS, expert)
        assert difference.abs().max() < 1e-12
    assert sum(part.num_experts for part in clamped + separate) == 2 * EXPERTS


def test_an_expert_of_another_rank_must_be_in_the_file() -> None:
    tensors = separate_tensors()
    del tensors["e.2.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"e\.2\.up_proj\.weight .* is missing"):
        whole(tensors, PLAIN, SeparateExperts(), 2)


@pytest.mark.parametrize("storage", [SeparateExperts(), FusedExperts(interleaved=False)])
def test_a_size_that_the_file_denies_takes_no_memory(storage: ExpertStorage) -> None:
    huge = replace(PLAIN, expert_intermediate_size=10**17)
    tensors = {"e.0.gate_proj.weight": torch.ones(2, 2), "e.gate_up_proj": torch.ones(2, 2, 2)}
    loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
    with pytest.raises(ModelFileError, match=r"e\..* has shape"):
        load_experts(loader, Shard(0, 1, SoloCommunicator()), "e", WIDTH, huge, storage)
