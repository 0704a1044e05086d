"""Routing follows the papers; experts, cut over ranks, add up to a loop over rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heddle.comm.solo import SoloCommunicator
from heddle.config.model import MoEConfig
from heddle.models.layers.moe import Router, load_moe
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from tests.support.checkpoints import CPU, DictSource

EXPERTS, WIDTH, INNER = 6, 8, 5
V2 = MoEConfig(
    num_experts=EXPERTS,
    num_experts_per_token=2,
    num_shared_experts=1,
    expert_intermediate_size=INNER,
    first_dense_layers=0,
    scoring="softmax",
    normalize_top_k=False,
    routed_scaling_factor=1.5,
)
V3 = replace(
    V2,
    scoring="sigmoid",
    normalize_top_k=True,
    top_k_method="noaux_tc",
    num_groups=3,
    top_k_groups=2,
)


def router(config: MoEConfig, logits: list[float], correction: list[float] | None = None) -> Router:
    """A router that gives these logits to the row `[1]`."""
    bias = None if correction is None else torch.tensor(correction, dtype=torch.float64)
    return Router(config, torch.tensor(logits, dtype=torch.float64)[:, None], bias)


ONE = torch.ones(1, 1, dtype=torch.float64)


def test_softmax_weights_are_scaled_and_not_normalised() -> None:
    experts, weights = router(V2, [0.0, 3.0, 1.0, 2.0, -1.0, 0.5])(ONE)
    assert experts.tolist() == [[1, 3]]
    scores = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0, 0.5], dtype=torch.float64).exp()
    expected = 1.5 * scores[[1, 3]] / scores.sum()
    assert (weights[0] - expected).abs().max() < 1e-15


def test_v2_rates_a_group_by_its_best_expert() -> None:
    config = replace(V2, top_k_method="group_limited_greedy", num_groups=3, top_k_groups=1)
    # Group 1 (experts 2, 3) holds the best expert; the second best overall, 4, is outside it.
    experts, _ = router(config, [0.0, 0.1, 5.0, -3.0, 4.0, 3.9])(ONE)
    assert sorted(experts[0].tolist()) == [2, 3]


def test_v3_rates_a_group_by_its_two_best() -> None:
    config = replace(V3, top_k_groups=1)
    # Group 2 (experts 4, 5) has the best pair though group 1 has the best single expert.
    experts, _ = router(config, [0.0, 0.1, 5.0, -9.0, 2.0, 1.9], [0.0] * EXPERTS)(ONE)
    assert sorted(experts[0].tolist()) == [4, 5]


def test_v3_correction_chooses_but_does_not_weigh() -> None:
    config = replace(V3, num_groups=1, top_k_groups=1)
    logits = [2.0, 1.0, 0.0, -1.0, -2.0, -3.0]
    experts, weights = router(config, logits, [0, 0, 0, 0, 0, 5.0])(ONE)
    assert sorted(experts[0].tolist()) == [0, 5]
    scores = torch.tensor(logits, dtype=torch.float64).sigmoid()
    chosen = scores[experts[0]]
    assert (weights[0] - 1.5 * chosen / chosen.sum()).abs().max() < 1e-15


def test_scores_are_float32_for_sixteen_bit_rows() -> None:
    tensors = random_tensors(V2, torch.bfloat16)
    loader = WeightLoader(DictSource(tensors), torch.bfloat16, CPU)
    block = load_moe(loader, Shard(0, 1, SoloCommunicator()), "m", WIDTH, V2)
    assert block.router.weight.dtype == torch.float32
    assert block.gate_up.dtype == torch.bfloat16
    _, weights = block.router(torch.ones(1, WIDTH, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32


def random_tensors(config: MoEConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"m.gate.weight": (EXPERTS, WIDTH)}
    if config.top_k_method == "noaux_tc":
        shapes["m.gate.e_score_correction_bias"] = (EXPERTS,)  # type: ignore[assignment]
    blocks = [f"m.experts.{expert}" for expert in range(EXPERTS)] + ["m.shared_experts"]
    for block in blocks:
        shapes |= {
            f"{block}.gate_proj.weight": (INNER, WIDTH),
            f"{block}.up_proj.weight": (INNER, WIDTH),
            f"{block}.down_proj.weight": (WIDTH, INNER),
        }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def feed_forward(tensors: dict[str, torch.Tensor], block: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (tensors[f"{block}.{side}_proj.weight"] for side in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("config", [V2, V3], ids=["v2", "v3"])
def test_cut_experts_add_up_to_a_loop_over_rows(config: MoEConfig, size: int) -> None:
    tensors = random_tensors(config, torch.float64)
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    total = torch.zeros_like(x)
    for rank in range(size):
        loader = WeightLoader(DictSource(tensors), torch.float64, CPU)
        block = load_moe(loader, Shard(rank, size, SoloCommunicator()), "m", WIDTH, config)
        loader.finish()
        total += block(x)
        experts, weights = block.router(x)
    visited = set(experts.flatten().tolist())
    assert len(visited) > 2
    for row in range(len(x)):
        expected = feed_forward(tensors, "m.shared_experts", x[row])
        for expert, weight in zip(experts[row].tolist(), weights[row], strict=True):
            expected = expected + weight * feed_forward(tensors, f"m.experts.{expert}", x[row])
        assert (total[row] - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1)


def test_no_rows_give_no_rows() -> None:
    loader = WeightLoader(DictSource(random_tensors(V3, torch.float64)), torch.float64, CPU)
    block = load_moe(loader, Shard(0, 1, SoloCommunicator()), "m", WIDTH, V3)
    assert block(torch.zeros(0, WIDTH, dtype=torch.float64)).shape == (0, WIDTH)
