"""Each row of a step is sent to its experts by one rank, and the calls are those of the plan."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given

from heddle.config.model import MoEConfig
from heddle.layout.mesh import Mesh
from heddle.step.experts import dispatched_rows, expert_calls
from heddle.step.localize import localize
from heddle.step.plan import plan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology
from heddle.step.traffic import Collective
from tests.support.batches import (
    make_batch,
    make_topology,
    request_lengths,
    topologies,
    whole_in_turn,
)

MOE = MoEConfig(
    num_experts=8,
    num_experts_per_token=3,
    expert_intermediate_size=4,
    first_dense_layers=1,
    scoring="softmax",
    normalize_top_k=False,
)


def dealt(sizes: tuple[int, int, int], dtype: str = "float32", replicas: int = 1) -> Topology:
    """Two layers, the second with experts."""
    topology = make_topology(sizes, row_policy=whole_in_turn, moe=MOE)
    mesh = dataclasses.replace(topology.mesh, dp_size=replicas)
    return dataclasses.replace(topology, has_expert_parallel=True, dtype=dtype, mesh=mesh)


@given(topologies(), request_lengths)
def test_each_row_is_sent_by_one_rank(topology: Topology, lengths: list[tuple[int, int]]) -> None:
    step_plan = plan(make_batch(topology, lengths), topology)
    senders: Counter[int] = Counter()
    copies: list[int] = []
    for rank in range(topology.mesh.world_size):
        step = localize(step_plan, topology, rank)
        rows = dispatched_rows(step, topology)
        assert rows.tolist() == sorted(set(rows.tolist()))
        senders.update(step_plan.rows.local_rows(step.pcp_rank)[rows].tolist())
        copies.append(int((rows < step.num_copy).sum()))
        assert step_plan.rows.valid[step.pcp_rank * step.num_local_rows + rows].all()
    assert senders == Counter(range(step_plan.rows.num_rows))
    assert max(copies) - min(copies) <= 1


@pytest.mark.parametrize(
    ("dtype", "wide", "row"),
    [("float32", "float32", 102), ("float64", "float64", 102), ("bfloat16", "float32", 108)],
)
def test_a_layer_with_experts_says_counts_rows_sums_and_copies(
    dtype: str, wide: str, row: int
) -> None:
    """A row is 96 numbers, and 3 ids and 3 weights of the wide dtype."""
    topology = dealt((2, 2, 1), dtype, replicas=2)
    step_plan = plan(make_batch(topology, [(0, 3), (0, 6), (4, 2)]), topology)
    assert step_plan.rows.num_copy == 2
    hidden = (step_plan.rows.num_local_rows, 96)
    for rank in range(topology.mesh.world_size):
        dense, sparse = collective_schedule(step_plan, topology, rank).layers
        assert sparse[: len(dense) - 1] == dense[:-1]
        assert sparse[len(dense) - 1 :] == (
            Collective("all_gather", "ep", (8,), "int64"),
            Collective("all_to_all", "ep", (8, None, row), dtype),
            Collective("all_to_all", "ep", (8, None, 96), wide),
            Collective("all_reduce", "pcp", (2, 96), dtype),
            Collective("all_reduce", "tp", hidden, dtype),
        )


def test_only_copied_rows_are_summed_over_pcp() -> None:
    topology = dealt((1, 2, 1))
    rows = plan(make_batch(topology, [(0, 3), (0, 6)]), topology).rows
    assert [call.group for call in expert_calls(rows, topology)] == ["ep", "ep", "ep"]


def test_an_idle_replica_makes_the_same_calls() -> None:
    topology = dealt((2, 1, 1), replicas=2)
    busy = plan(make_batch(topology, [(0, 3), (0, 6), (4, 2)]), topology)
    idle = plan(make_batch(topology, []), topology)
    calls = [list(expert_calls(found.rows, topology)) for found in (busy, idle)]
    assert calls[0] == calls[1]
    assert len(calls[0]) == 3


@pytest.mark.parametrize(
    "topology",
    [
        dealt((1, 1, 1)),
        dataclasses.replace(dealt((2, 1, 1)), has_expert_parallel=False),
    ],
    ids=["one rank", "not asked for"],
)
def test_nothing_is_said_where_nothing_is_dealt(topology: Topology) -> None:
    rows = plan(make_batch(topology, [(0, 6)]), topology).rows
    assert list(expert_calls(rows, topology)) == []


def test_stages_deal_among_themselves() -> None:
    topology = dealt((2, 1, 1))
    topology = dataclasses.replace(topology, mesh=Mesh(tp_size=2, pp_size=2))
    step_plan = plan(make_batch(topology, [(0, 6)]), topology)
    kinds = [
        [
            call.group
            for call in collective_schedule(step_plan, topology, rank)
            if call.group == "ep"
        ]
        for rank in range(4)
    ]
    assert [len(found) for found in kinds] == [0, 0, 3, 3], "the first layer is dense"
