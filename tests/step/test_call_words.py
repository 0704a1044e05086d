"""Words for the calls of attention: as many as there are calls, and the right ones."""

from __future__ import annotations

from hypothesis import given

from heddle.step.call_words import attention_words
from heddle.step.plan import plan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology
from tests.support.batches import (
    by_length,
    make_batch,
    make_topology,
    request_lengths,
    topologies,
)


def carried(topology: Topology, lengths: list[tuple[int, int]]) -> list[str]:
    step_plan = plan(make_batch(topology, lengths), topology)
    return [words.carries for words in attention_words(step_plan, topology, 0, 0)]


@given(topologies(), request_lengths)
def test_each_call_of_a_layer_has_words(topology: Topology, lengths: list[tuple[int, int]]) -> None:
    step_plan = plan(make_batch(topology, lengths), topology)
    for rank in range(topology.mesh.world_size):
        tp_rank = topology.mesh.coord_of(rank).tp
        layers = collective_schedule(step_plan, topology, rank).layers
        for layer, calls in zip(topology.stage_layers(rank), layers, strict=True):
            inside = [call for call in calls if call.group != "tp"]
            group = topology.group_of_layer[layer]
            words = attention_words(step_plan, topology, group, tp_rank)
            assert len(words) == len(inside)
            assert all(found.reason for found in words)


def test_a_mixed_step_says_what_travels_in_order() -> None:
    topology = make_topology((2, 2, 4), return_exchange="ag_rs", row_policy=by_length)
    words = carried(topology, [(30, 1), (16, 8)])
    assert words[0] == "new KV rows"
    assert words[1:4] == [
        "copy rows: queries",
        "copy rows: log-sum-exps, for the merge",
        "copy rows: weighed partials, summed",
    ]
    assert set(words[4:]) <= {
        "split rows: cached KV",
        "split rows: queries",
        "split rows: log-sum-exps, for the merge",
        "split rows: weighed partials, summed",
    }


def test_an_all_to_all_carries_both() -> None:
    topology = make_topology((2, 1, 2), return_exchange="a2a", row_policy=by_length)
    assert carried(topology, [(30, 1)]) == [
        "copy rows: queries",
        "copy rows: partials with their log-sum-exps, for the merge",
    ]


def test_one_rank_has_nothing_to_say() -> None:
    assert carried(make_topology((1, 1, 1)), [(30, 1), (0, 8)]) == []
