"""A rank's share of weights and experts, and the sum that puts partial results together."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from heddle.comm.base import Communicator
from heddle.comm.threads import ThreadGroup, ThreadWorld
from heddle.models.layers.expert_group import ExpertGroup, ExpertLoad
from heddle.models.layers.shard import Shard


@pytest.mark.parametrize("size", [1, 2, 3])
def test_experts_are_all_here_and_cut_or_whole_and_dealt(size: int) -> None:
    def body(world: ThreadWorld) -> tuple[object, object]:
        ep = world.group("ep", [list(range(size))])
        tp = world.group("tp", [list(range(size))])
        group = ExpertGroup(ep=ep, pcp=tp, load=ExpertLoad(7))
        cut = Shard(tp.rank, size, tp).cut_experts(7, 10)
        return cut, Shard(tp.rank, size, tp, group).cut_experts(7, 10)

    found = ThreadGroup(size).run(body)
    weights = [
        {(expert, unit) for expert in range(*experts) for unit in range(*inner)}
        for way in zip(*found, strict=True)
        for experts, inner in cast("list[tuple[tuple[int, int], tuple[int, int]]]", way)
    ]
    everything = {(expert, unit) for expert in range(7) for unit in range(10)}
    for shares in (weights[:size], weights[size:]):
        assert sum(map(len, shares)) == len(everything)
        assert set().union(*shares) == everything
    assert all(experts == (0, 7) for (experts, _), _ in cast("list[tuple[tuple]]", found))  # type: ignore[type-arg]
    assert all(inner == (0, 10) for _, (_, inner) in cast("list[tuple[tuple]]", found))  # type: ignore[type-arg]


def test_partial_results_add_up_on_all_ranks() -> None:
    def body(world: ThreadWorld) -> torch.Tensor:
        tp = world.group("tp", [[0, 1, 2]])
        return Shard(tp.rank, 3, tp).sum(torch.tensor([tp.rank + 1.0, 10.0]))

    for found in ThreadGroup(3).run(body):
        assert found.tolist() == [6.0, 30.0]


def test_a_rank_alone_says_nothing() -> None:
    partial = torch.ones(2)
    assert Shard(0, 1, cast("Communicator", None)).sum(partial) is partial
