"""A sketched step is the planner's: costs add up to the schedule that ranks obey."""

from __future__ import annotations

import pytest

from heddle.cli.show_topology import Shown, create_topology, find_model
from heddle.cli.step_sketch import sketch_step
from heddle.config import ParallelConfig
from heddle.config.link_costs import LinkCosts
from heddle.planner.batches import Rows, create_batch
from heddle.step.plan import plan
from heddle.step.schedule import collective_schedule
from heddle.step.traffic import cost_of
from tests.support.batches import make_topology, whole_in_turn
from tests.support.tiny import build_tiny

PARTS = [Rows(0, 64), Rows(96, 64), Rows(96, 1)]
MODELS = ("llama-8-2", "gpt-oss", "qwen3-next", "deepseek-v3", "deepseek-v32")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        name: find_model(str(build_tiny(tmp_path_factory.mktemp("sketch"), name)))
        for name in MODELS
    }


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4), (2, 2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_costs_what_its_schedule_lists(models, name, sizes):
    tp, pcp, dcp = sizes
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
    )
    shown = create_topology(models[name], parallel, block_size=4)
    topology = shown.topology
    step = sketch_step(shown, 64)
    batch = create_batch(topology, PARTS)
    schedule = collective_schedule(plan(batch, topology), topology, global_rank=0)
    # Every layer also adds up its rows over TP, after its mixer and after its feed-forward block.
    rows = plan(batch, topology).rows.num_local_rows
    sums = (2, 2 * rows * topology.model.hidden_size * 4) if tp == 2 else (0, 0)
    for layer, calls in enumerate(schedule.layers):
        if topology.model.kind_of(layer).mixer == "recurrent":
            found = step["recurrent"]
        else:
            found = step["cache_groups"][topology.group_of_layer[layer]]
        cost = cost_of(calls, topology.mesh)
        assert (found["calls"] + sums[0], found["bytes"] + sums[1]) == (
            cost.calls,
            cost.received_bytes,
        )
    assert len(schedule.layers) == topology.model.num_layers


def test_parts_of_a_group_add_up():
    topology = make_topology((2, 2, 4), return_exchange="auto", context_exchange="ring_kv")
    shown = Shown(topology=topology, max_num_batched_tokens=512, costs_reason="none")
    (group,) = sketch_step(shown, 64)["cache_groups"]
    parts = [group["new_rows"], *group["classes"]]
    assert len(parts) >= 2
    for unit in ("calls", "bytes"):
        assert sum(part[unit] for part in parts) == group[unit] > 0


def test_the_calls_of_experts_are_counted_where_they_are_dealt_out(models):
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True)
    shown = create_topology(models["gpt-oss"], parallel, block_size=4)
    topology, step = shown.topology, sketch_step(shown, 64)
    found = plan(create_batch(topology, PARTS), topology)
    schedule = collective_schedule(found, topology, global_rank=0)
    layer = schedule.layers[0]
    assert step["experts"]["calls"] == sum(call.group == "ep" for call in layer) > 0
    alone = create_topology(models["gpt-oss"], ParallelConfig(), block_size=4)
    assert sketch_step(alone, 64)["experts"] is None


def test_classes_owners_and_reasons_are_those_of_the_plan():
    topology = make_topology((1, 3, 3), row_policy=whole_in_turn)
    shown = Shown(topology=topology, max_num_batched_tokens=512, costs_reason="because")
    step = sketch_step(shown, 30)
    assert [
        (row["what"], row["new_rows"], row["cached"], row["row_class"], row["owner"])
        for row in step["requests"]
    ] == [
        ("fresh prompt", 30, 0, "whole", 0),
        ("later piece", 64, 96, "split", None),
        ("decode", 1, 96, "copy", None),
    ]
    assert step["reasons"][-1] == "because"
    assert set(step["costs"]) == set(LinkCosts.__slots__)


def test_a_prompt_is_cut_where_a_step_is_full():
    shown = Shown(topology=make_topology((1, 1, 1)), max_num_batched_tokens=80, costs_reason="")
    start, piece, decode = sketch_step(shown, 10**9)["requests"]
    assert (start["what"], start["new_rows"]) == ("start of a prompt", 15)
    assert start["new_rows"] + piece["new_rows"] + decode["new_rows"] == 80
    assert [row["what"] for row in sketch_step(shown, 0)["requests"]] == ["later piece", "decode"]
