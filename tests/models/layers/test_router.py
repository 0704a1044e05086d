"""Routing follows the papers and the published model code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

from heddle.config.model import MoEConfig
from heddle.models.layers.router import Router, load_router
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU
from tests.support.experts import EXPERTS, V2, V3


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


def test_softmax_of_the_chosen_is_the_normalised_softmax_of_all() -> None:
    """As gpt-oss computes it: the choice first, then a softmax over it, with biased logits."""
    generator = torch.Generator().manual_seed(8)
    theirs = GptOssTopKRouter(
        GptOssConfig(num_local_experts=EXPERTS, num_experts_per_tok=3, hidden_size=7)
    ).double()
    with torch.no_grad():
        theirs.weight.normal_(generator=generator)
        theirs.bias.normal_(generator=generator)
    config = replace(
        V2,
        num_experts_per_token=3,
        normalize_top_k=True,
        routed_scaling_factor=1.0,
        chooses_by_logits=True,
        has_router_bias=True,
    )
    tensors = {"r.weight": theirs.weight.detach(), "r.bias": theirs.bias.detach()}
    ours = load_router(WeightLoader(MemorySource(tensors), torch.float64, CPU), "r", 7, config)
    x = torch.randn(11, 7, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        _, expected, expected_experts = theirs(x)
        experts, weights = ours(x)
    assert torch.equal(experts, expected_experts)
    assert (weights - expected).abs().max() < 1e-14


def test_large_logits_are_ranked_before_the_sigmoid_flattens_them() -> None:
    config = replace(V2, num_experts_per_token=1, scoring="sigmoid", routed_scaling_factor=1.0)
    logits = 40 + 5 * torch.eye(EXPERTS)  # row i is for expert i
    assert (logits.sigmoid() == 1).all()
    router = Router(replace(config, chooses_by_logits=True), logits.T.contiguous(), None)
    experts, weights = router(torch.eye(EXPERTS))
    assert experts[:, 0].tolist() == list(range(EXPERTS))
    assert (weights == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_are_never_narrower_than_float32(dtype: torch.dtype) -> None:
    loader = WeightLoader(
        MemorySource({"r.weight": torch.ones(EXPERTS, 3, dtype=dtype)}), dtype, CPU
    )
    router = load_router(loader, "r", 3, V2)
    assert router.weight.dtype == torch.float32
    _, weights = router(torch.ones(1, 3, dtype=dtype))
    assert weights.dtype == torch.float32
