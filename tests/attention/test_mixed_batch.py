"""A long prompt beside a running decode: each exchange forced, then chosen, all priced and counted.

The prompt's first piece has no context, its second piece meets the first one in the cache.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heddle.config.link_costs import LinkCosts
from heddle.layout.rows import RowClass
from heddle.step.plan import StepPlan, plan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology
from heddle.step.traffic import Cost, cost_of
from tests.support.attention_bench import call_gqa, gqa_truth, run_ranks
from tests.support.batches import by_length, make_batch, make_topology

SIZES = [(1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 2, 4), (1, 4, 4)]
RETURNS = ("ag_rs", "ag_ar", "a2a", "a2a_fine", "auto")
CONTEXTS = ("gather_kv", "gather_q", "ring_kv", "pass_q", "auto")
PIECES = ([(0, 24), (11, 1)], [(24, 24), (11, 1)])


def run(topology: Topology, lengths: list[tuple[int, int]]) -> StepPlan:
    """One layer on thread ranks: exact, and on every rank just the calls and bytes of the plan."""
    topology = dataclasses.replace(topology, dtype="float64", kv_cache_dtype="float64")
    batch = make_batch(topology, lengths)
    step_plan = plan(batch, topology)
    truth = gqa_truth(topology, batch, torch.float64)
    results = run_ranks(topology, batch, truth, call_gqa, "reference")
    assert len(results) == topology.mesh.world_size
    for rank, result in enumerate(results):
        assert result.error <= 1e-12
        layer = collective_schedule(step_plan, topology, rank).layers[0]
        sums = 2 * (topology.mesh.tp_size > 1)  # those of the dense layers are not run here
        priced = cost_of(layer[: len(layer) - sums], topology.mesh)
        received = sum(int(record.bytes_received) for record in result.trace.records)
        assert Cost(len(result.trace.records), received) == priced
    return step_plan


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("returns", RETURNS)
def test_every_way_back(sizes: tuple[int, int, int], returns: str) -> None:
    topology = make_topology(
        sizes, return_exchange=returns, context_exchange="gather_q", row_policy=by_length
    )
    for lengths in PIECES:
        run(topology, lengths)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_way_to_meet_context(sizes: tuple[int, int, int], context: str) -> None:
    topology = make_topology(
        sizes, return_exchange="auto", context_exchange=context, row_policy=by_length
    )
    fresh, continued = (run(topology, lengths) for lengths in PIECES)
    assert fresh.groups[0].classes[RowClass.SPLIT].context == "none"
    found = continued.groups[0].classes[RowClass.SPLIT].context
    assert found == context if context != "auto" else found in CONTEXTS[:-1]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (LinkCosts(alpha=1.0, beta=1e18, flops=1e18), "gather_kv"),
        (LinkCosts(alpha=0.0, beta=1.0, flops=1e18), "gather_kv"),
        (LinkCosts(alpha=1e-9, beta=1e6, flops=1e3), "ring_kv"),
    ],
    ids=["calls decide", "bytes decide", "arithmetic hides"],
)
def test_the_trace_says_why_auto_chose(costs: LinkCosts, expected: str) -> None:
    topology = dataclasses.replace(
        make_topology(
            (1, 4, 4), return_exchange="auto", context_exchange="auto", row_policy=by_length
        ),
        costs=costs,
    )
    step_plan = run(topology, PIECES[1])
    assert step_plan.groups[0].classes[RowClass.SPLIT].context == expected
    copy_reason, split_reason = step_plan.reasons
    assert copy_reason.startswith("group 0, copy rows: the cheapest of 3: ")
    assert split_reason.startswith(f"group 0, split rows: the cheapest of 5: {expected} ")
    assert all(
        f"{name} " in split_reason for name in ("gather_kv", "ring_kv", "gather_q", "pass_q")
    )
