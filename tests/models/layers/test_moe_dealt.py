"""Experts dealt over ranks give every row what one rank gives it, wherever the row lives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from heddle.attention.base import DealtRows
from heddle.comm.base import World
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup
from heddle.config.model import MoEConfig
from heddle.layout.mesh import Mesh
from heddle.models.layers.expert_group import ExpertGroup, ExpertLoad
from heddle.models.layers.moe import DealtMoE, load_moe
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from heddle.step.experts import dispatched_rows
from heddle.step.localize import localize
from heddle.step.plan import StepPlan, plan
from heddle.step.topology import Topology
from tests.support.batches import make_batch, make_topology, whole_in_turn
from tests.support.checkpoints import CPU
from tests.support.experts import EXPERTS, V2, V3, WIDTH, mixture_row, random_tensors

MESHES = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)]
"""(tp, pcp, dp)."""
WHOLE, SPLIT, COPY = (0, 5), (0, 11), (6, 1)
"""Requests (cached, new); `whole_in_turn` gives the first WHOLE, the second SPLIT, the third COPY.
"""
BATCHES: dict[str, list[list[tuple[int, int]]]] = {
    "mixed": [[WHOLE, SPLIT, COPY, WHOLE, SPLIT, (0, 6)], [WHOLE]],
    "one replica is idle": [[WHOLE, SPLIT, COPY], []],
    "the first replica is idle": [[], [WHOLE, SPLIT, COPY]],
    "fewer rows than ranks": [[(0, 1)], [(0, 1)]],
    "nobody has rows": [[], []],
}


@dataclass
class Ops:
    """What the block reads of a step."""

    dealt_rows: DealtRows
    adapters: None = None


def topology_of(mesh: tuple[int, int, int]) -> Topology:
    tp, pcp, dp = mesh
    topology = make_topology((tp, pcp, 1), row_policy=whole_in_turn)
    return dataclasses.replace(
        topology, mesh=Mesh(tp_size=tp, pcp_size=pcp, dp_size=dp), has_expert_parallel=True
    )


def rows_of(replica: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(40 + replica)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def run_ranks(
    mesh: tuple[int, int, int],
    plans: list[StepPlan],
    tensors: dict[str, torch.Tensor],
    config: MoEConfig,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per rank its rows behind the sum over TP, `[M, E]`, and the load of its experts, `[X]`."""
    topology = topology_of(mesh)

    def body(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        rank = world.global_rank
        tp, pcp, ep = (world.group(k, topology.mesh.groups(k)) for k in ("tp", "pcp", "ep"))
        coord = topology.mesh.coord_of(rank)
        group = ExpertGroup(ep, pcp, ExpertLoad(EXPERTS))
        shard = Shard(coord.tp, mesh[0], tp, group)
        loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
        block = load_moe(loader, shard, "m", WIDTH, config)
        loader.finish()
        assert isinstance(block, DealtMoE)
        step_plan = plans[coord.dp]
        step = localize(step_plan, topology, rank)
        x = rows_of(coord.dp, step_plan.rows.num_rows)
        x = x[torch.tensor(step_plan.rows.local_rows(coord.pcp))] if len(x) else x
        x[~valid_rows(step_plan, coord.pcp)] = torch.nan
        dealt = DealtRows(torch.tensor(dispatched_rows(step, topology)), step.num_copy)
        return shard.sum(block(x, Ops(dealt))), group.load.rows  # type: ignore[arg-type]

    return ThreadGroup(topology.mesh.world_size).run(body)


def valid_rows(step_plan: StepPlan, pcp_rank: int) -> torch.Tensor:
    count = step_plan.rows.num_local_rows
    return torch.tensor(step_plan.rows.valid[pcp_rank * count : (pcp_rank + 1) * count])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_row_gets_what_one_rank_gives_it_and_counts_once(
    mesh: tuple[int, int, int], batch: str
) -> None:
    topology, dp = topology_of(mesh), mesh[2]
    plans = [plan(make_batch(topology, lengths), topology) for lengths in BATCHES[batch][:dp]]
    config = V3 if mesh[0] == 1 else V2
    tensors = random_tensors(config, torch.float64)
    found = run_ranks(mesh, plans, tensors, config)
    loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
    router = load_moe(loader, Shard(0, 1, SoloCommunicator()), "m", WIDTH, config).router  # type: ignore[union-attr]
    load, checked = torch.zeros(EXPERTS, dtype=torch.int64), 0
    for replica, step_plan in enumerate(plans):
        x = rows_of(replica, step_plan.rows.num_rows)
        experts, weights = router(x)
        load += experts.flatten().bincount(minlength=EXPERTS)
        for rank, (out, _) in enumerate(found):
            coord = topology.mesh.coord_of(rank)
            if coord.dp != replica:
                continue
            local = step_plan.rows.local_rows(coord.pcp)
            for place in np.flatnonzero(valid_rows(step_plan, coord.pcp).numpy()):
                row = int(local[place])
                expected = mixture_row(tensors, x[row], experts[row].tolist(), weights[row])
                assert (out[place] - expected).abs().max() <= 1e-12 * expected.abs().max()
                checked += 1
    assert (checked > 0) is any(BATCHES[batch][:dp])
    assert torch.equal(sum(part for _, part in found), load)  # type: ignore[arg-type]
    share = [part.nonzero().flatten().tolist() for _, part in found]
    size = len(found)
    for rank, experts_met in enumerate(share):
        assert set(experts_met) <= set(range(EXPERTS * rank // size, EXPERTS * (rank + 1) // size))


def test_copied_rows_lie_on_all_ranks_and_are_counted_once() -> None:
    topology = topology_of((2, 2, 1))
    step_plan = plan(make_batch(topology, [(0, 1), (0, 1), (5, 3)]), topology)
    assert step_plan.rows.num_copy == 3
    found = run_ranks((2, 2, 1), [step_plan], random_tensors(V2, torch.float64), V2)
    assert sum(int(load.sum()) for _, load in found) == 5 * V2.num_experts_per_token
    copies = [out[:3] for out, _ in found]
    assert all(torch.equal(copies[0], other) for other in copies[1:])


def test_a_weight_may_multiply_what_enters_a_distant_expert() -> None:
    topology, config = topology_of((2, 1, 1)), replace(V2, scoring="sigmoid", scales_input=True)
    step_plan = plan(make_batch(topology, [(0, 7)]), topology)
    tensors = random_tensors(config, torch.float64)
    found = run_ranks((2, 1, 1), [step_plan], tensors, config)
    loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
    whole = load_moe(loader, Shard(0, 1, SoloCommunicator()), "m", WIDTH, config)
    expected = whole(rows_of(0, 7))  # type: ignore[call-arg]
    for out, _ in found:
        assert (out - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_narrow_rows_are_no_worse_than_on_one_rank() -> None:
    """In bfloat16 sums form in float32 and are rounded once."""
    tensors = random_tensors(V2, torch.float64)
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    x = rows_of(0, 9).to(torch.bfloat16)

    def block_of(shard: Shard, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> object:
        return load_moe(WeightLoader(MemorySource(weights), dtype, CPU), shard, "m", WIDTH, V2)

    def body(world: World) -> torch.Tensor:
        ep, tp = (world.group(kind, [range(2)]) for kind in ("ep", "tp"))
        group = ExpertGroup(ep, SoloCommunicator(), ExpertLoad(EXPERTS))
        shard = Shard(world.global_rank, 2, tp, group)
        dealt = DealtRows(torch.arange(world.global_rank, 9, 2), 0)
        return shard.sum(block_of(shard, narrow, torch.bfloat16)(x, Ops(dealt)))  # type: ignore[operator]

    alone = Shard(0, 1, SoloCommunicator())
    plain = block_of(alone, narrow, torch.bfloat16)
    experts, weights = plain.router(x)  # type: ignore[attr-defined]
    exact = {name: tensor.double() for name, tensor in narrow.items()}
    truth = torch.stack(
        [
            mixture_row(exact, x[row].double(), experts[row].tolist(), weights[row].double())
            for row in range(9)
        ]
    )
    bound = 2 * (plain(x).double() - truth).abs().max() + truth.abs().max() / 256  # type: ignore[operator]
    for out in ThreadGroup(2).run(body):
        assert out.dtype == torch.bfloat16
        assert (out.double() - truth).abs().max() <= bound
