"""All members of a group issue the same calls, whatever any of them holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from heddle.layout.mesh import GROUP_KINDS
from heddle.step.plan import plan
from heddle.step.schedule import Collective, collective_schedule
from heddle.step.topology import Topology
from tests.support.batches import (
    by_length,
    make_batch,
    make_topology,
    request_lengths,
    topologies,
)


@given(topologies(), request_lengths)
def test_members_of_a_group_hold_equal_schedules(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    step_plan = plan(make_batch(topology, lengths), topology)
    schedules = [
        list(collective_schedule(step_plan, topology, rank))
        for rank in range(topology.mesh.world_size)
    ]
    for kind in GROUP_KINDS:
        for group in topology.mesh.groups(kind):
            calls = [[call for call in schedules[rank] if call.group == kind] for rank in group]
            assert all(other == calls[0] for other in calls)
            assert len(group) > 1 or not calls[0]


@given(topologies(), request_lengths)
def test_a_call_is_found_again_by_where_its_layer_ends(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    schedule = collective_schedule(plan(make_batch(topology, lengths), topology), topology, 0)
    calls, ends = list(schedule), schedule.layer_ends
    assert tuple(calls[: ends[0]]) == schedule.prologue
    pairs = list(zip(pairwise(ends), schedule.layers, strict=True))
    assert len(pairs) == topology.model.num_layers
    for (start, end), layer in pairs:
        assert tuple(calls[start:end]) == layer
    assert tuple(calls[ends[-1] :]) == schedule.epilogue


def test_an_empty_rank_and_a_rank_without_context_still_join() -> None:
    """Context of 3 tokens on 4 ranks, interleave 2: shares are 2 1 0 0, and all four gather."""
    topology = make_topology((1, 4, 4), interleave=2, row_policy=by_length)
    step_plan = plan(make_batch(topology, [(3, 8)]), topology)
    for rank in range(4):
        layer = collective_schedule(step_plan, topology, rank).layers[0]
        assert layer == (
            Collective("all_gather", "pcp", (2, 4, 16), "float32"),
            Collective("all_gather", "dcp", (2, 4, 16), "float32"),
        )


def test_a_class_absent_from_the_global_batch_has_no_calls() -> None:
    topology = make_topology((2, 2, 4), return_exchange="a2a", row_policy=by_length)
    decodes = plan(make_batch(topology, [(9, 1), (30, 1)]), topology)
    layer = collective_schedule(decodes, topology, 0).layers[0]
    assert [(call.op, call.group) for call in layer] == [
        ("all_gather", "slice"),
        ("all_to_all", "dcp"),
        ("all_reduce", "tp"),
        ("all_reduce", "tp"),
    ]
    assert layer[1].shape == (4, 2, 6, 9)


def test_an_exchange_without_calls_is_not_scheduled_as_another() -> None:
    topology = make_topology((1, 2, 2), return_exchange="ring")
    with pytest.raises(ValueError, match="returns='ring' has no calls"):
        plan(make_batch(topology, [(9, 1)]), topology)


def test_norms_over_all_heads_are_summed_in_front_of_attention() -> None:
    for dtype, wide in (("bfloat16", "float32"), ("float64", "float64")):
        plain = replace(make_topology((2, 1, 1)), dtype=dtype)
        topology = replace(plain, model=replace(plain.model, qk_width_norm=True))
        step_plan = plan(make_batch(topology, [(9, 1), (3, 7)]), topology)
        sums = Collective("all_reduce", "tp", (step_plan.rows.num_local_rows, 2), wide)
        for found, expected in zip(
            collective_schedule(step_plan, topology, 1).layers,
            collective_schedule(step_plan, plain, 1).layers,
            strict=True,
        ):
            assert found == (sums, *expected)


def test_one_rank_issues_nothing() -> None:
    topology = make_topology((1, 1, 1))
    step_plan = plan(make_batch(topology, [(4, 9), (3, 1)]), topology)
    assert list(collective_schedule(step_plan, topology, 0)) == []
