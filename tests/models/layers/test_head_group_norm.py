"""A norm over groups of heads, cut over ranks or not, is the norm of each group."""

from __future__ import annotations

import pytest
import torch

from heddle.comm.base import Communicator
from heddle.config.model import RecurrentConfig
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.models.layers.head_group_norm import load_head_group_norm
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU, run_tp


class Watched:
    """A group that counts its calls."""

    def __init__(self, group: Communicator) -> None:
        self._group, self.world_size, self.shapes = group, group.world_size, []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(tensor.shape))
        return self._group.all_reduce(tensor)


@pytest.mark.parametrize(
    ("groups", "tp_size", "sums"),
    [(1, 1, 0), (1, 2, 1), (2, 2, 0), (2, 3, 2), (3, 3, 0), (3, 2, 3), (6, 4, 0)],
)
def test_groups_that_cross_ranks_take_one_sum(groups: int, tp_size: int, sums: int) -> None:
    heads, width, eps = 6, 5, 1e-3
    config = RecurrentConfig(
        method="mamba2",
        num_heads=heads,
        num_key_heads=1,
        key_dim=2,
        value_dim=width,
        norm_groups=groups,
    )
    layout = RecurrentLayout(config, tp_size)
    assert layout.num_norm_sums == sums
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, heads, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(heads * width, generator=generator, dtype=torch.float64)
    grouped = x.reshape(4, groups, -1)
    scale = (grouped.square().mean(-1, keepdim=True) + eps).sqrt()
    expected = (grouped / scale).reshape(4, -1) * weight

    def body(rank: int, tp: Communicator) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        watched = Watched(tp)
        shard = Shard(rank, tp_size, watched)  # type: ignore[arg-type]
        loader = WeightLoader(MemorySource({"norm.weight": weight}), torch.float64, CPU)
        norm = load_head_group_norm(loader, shard, layout, "norm", eps)
        first, last = layout.head_range(rank)
        return norm(x[:, first:last]).flatten(1), watched.shapes

    results = run_tp(tp_size, body)
    assert (torch.cat([out for out, _ in results], 1) - expected).abs().max() <= 1e-12
    for _, shapes in results:
        assert shapes == ([(4, sums)] if sums else [])
