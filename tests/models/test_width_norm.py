"""Norms over the whole width: ranks together norm as one does, whatever they hold copies of."""

from __future__ import annotations

import pytest
import torch

from heddle.comm.base import Communicator
from heddle.models.base import BuildContext
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from heddle.models.width_norm import load_width_norm
from tests.support.checkpoints import CPU, head_layout, run_tp
from tests.support.models import model_config

WIDTH, ROWS = 6, 4


def reference(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    flat = heads.flatten(1)
    return (flat / (flat.square().mean(1, keepdim=True) + eps).sqrt() * weight).view_as(heads)


@pytest.mark.parametrize("replicates", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "tp_size", "slice_size"),
    [
        ((6, 2), 1, 1),
        ((6, 2), 2, 1),
        ((6, 2), 3, 1),
        ((6, 2), 4, 2),
        ((7, 1), 4, 1),
        ((7, 1), 3, 3),
    ],
)
def test_ranks_together_norm_as_one(
    num_heads: tuple[int, int], tp_size: int, slice_size: int, replicates: bool
) -> None:
    num_queries, num_keys = num_heads
    config = model_config(
        num_query_heads=num_queries,
        num_kv_heads=num_keys,
        head_dim=WIDTH,
        rms_norm_eps=0.3,
        qk_width_norm=True,
    )
    heads = head_layout(config, tp_size, slice_size)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key = draw(ROWS, num_queries, WIDTH), draw(ROWS, num_keys, WIDTH)
    weights = {
        "a.q_norm.weight": draw(num_queries * WIDTH),
        "a.k_norm.weight": draw(num_keys * WIDTH),
    }
    expected = [
        reference(x, weight, 0.3) for x, weight in zip((query, key), weights.values(), strict=True)
    ]

    def check(rank: int, tp: Communicator) -> None:
        loader = WeightLoader(MemorySource(weights), torch.float64, CPU)
        shard = Shard(rank, tp_size, tp)
        context = BuildContext(config, heads, shard, loader, replicates_queries=replicates)
        norm = load_width_norm(context, "a")
        loader.finish()
        lanes = torch.zeros(ROWS, context.num_projected_lanes, WIDTH, dtype=torch.float64)
        wanted = torch.zeros_like(lanes)
        for place, (first, last) in enumerate(context.projected_ranges):
            span = slice(place * heads.lanes, place * heads.lanes + last - first)
            lanes[:, span], wanted[:, span] = query[:, first:last], expected[0][:, first:last]
        own = slice(*context.kv_range)
        found = norm(torch.cat([lanes, key[:, own]], dim=1))
        assert (found - torch.cat([wanted, expected[1][:, own]], dim=1)).abs().max() < 1e-12

    run_tp(tp_size, check)


def test_narrow_heads_are_normed_in_float32() -> None:
    config = model_config(num_query_heads=2, num_kv_heads=1, head_dim=WIDTH, qk_width_norm=True)
    weights = {"a.q_norm.weight": torch.ones(12), "a.k_norm.weight": torch.ones(6)}
    heads = torch.full((1, 3, WIDTH), 300.0, dtype=torch.float16)  # the square overflows

    def check(rank: int, tp: Communicator) -> None:
        loader = WeightLoader(MemorySource(weights), torch.float16, CPU)
        context = BuildContext(config, head_layout(config), Shard(rank, 1, tp), loader)
        found = load_width_norm(context, "a")(heads)
        assert found.dtype == torch.float16
        assert torch.equal(found, torch.ones_like(found))

    run_tp(1, check)
