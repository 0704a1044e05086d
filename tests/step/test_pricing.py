"""`auto` takes the cheapest way by its own model of cost, the same on every rank, and says why."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.link_costs import LinkCosts
from heddle.config.model import MLAConfig
from heddle.layout.rows import RowClass
from heddle.step.class_plan import ClassPlan
from heddle.step.exchanges import ExchangeSizes, describe
from heddle.step.plan import plan
from heddle.step.topology import Topology
from heddle.step.traffic import cost_of
from tests.support.batches import LAYOUTS, make_batch, make_topology, request_lengths

prices = st.builds(
    LinkCosts,
    alpha=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2]),
    beta=st.sampled_from([1e5, 1e8, 1e12]),
    flops=st.sampled_from([1e7, 1e10]),
)


def auto(sizes: tuple[int, int, int], costs: LinkCosts) -> Topology:
    topology = make_topology(
        sizes, return_exchange="auto", context_exchange="auto", workspace=1 << 16
    )
    return dataclasses.replace(topology, costs=costs)


def class_plans(topology: Topology, lengths: list[tuple[int, int]]) -> dict[RowClass, ClassPlan]:
    (group,) = plan(make_batch(topology, lengths), topology).groups
    return group.classes


@given(st.sampled_from([sizes for sizes in LAYOUTS if sizes[2] > 1]), request_lengths, prices)
def test_no_way_that_may_be_asked_for_is_cheaper(
    sizes: tuple[int, int, int], lengths: list[tuple[int, int]], costs: LinkCosts
) -> None:
    """COPY rows do the same arithmetic whatever the way, so calls and bytes decide alone."""
    topology = auto(sizes, costs)
    batch = make_batch(topology, lengths)
    rows = plan(batch, topology).rows
    chosen = class_plans(topology, lengths)[RowClass.COPY]
    if rows.num_copy == 0:
        return
    shape = ExchangeSizes.of(topology, 0)

    def seconds(returns: str) -> float:
        asked = dataclasses.replace(chosen, returns=returns)
        cost = cost_of(describe(asked, rows.num_copy, shape), topology.mesh)
        return cost.calls * costs.alpha + cost.received_bytes / costs.beta

    replicas = min(sizes[1], sizes[2])
    ways = ["ag_rs", "ag_ar", "a2a"]
    if replicas > 1 and topology.heads.lanes % replicas == 0:
        ways.append("a2a_fine")
    assert seconds(chosen.returns) <= min(map(seconds, ways)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("cached", "new", "expected"),
    [(4096, 16, "queries"), (64, 2048, "keys")],
)
def test_the_shorter_side_travels(cached: int, new: int, expected: str) -> None:
    """Where bytes decide: few queries go to a long context, a short context to many queries."""
    topology = auto((1, 4, 4), LinkCosts(alpha=0.0, beta=1e6, flops=1e18))
    topology = dataclasses.replace(topology, row_policy=_split)
    chosen = class_plans(topology, [(cached, new)])[RowClass.SPLIT]
    sides = {"gather_q": "queries", "pass_q": "queries", "gather_kv": "keys", "ring_kv": "keys"}
    assert sides[chosen.context] == expected


def test_where_calls_decide_the_fewest_win() -> None:
    topology = auto((1, 4, 4), LinkCosts(alpha=1.0, beta=1e18, flops=1e18))
    topology = dataclasses.replace(topology, row_policy=_split)
    assert class_plans(topology, [(100, 16)])[RowClass.SPLIT].context == "gather_kv"
    copied = dataclasses.replace(topology, row_policy=_copy)
    assert class_plans(copied, [(100, 1)])[RowClass.COPY].returns == "a2a"


def test_a_ring_hides_its_transfers_under_enough_arithmetic() -> None:
    slow = LinkCosts(alpha=1e-9, beta=1e9, flops=1e6)
    topology = dataclasses.replace(auto((1, 4, 4), slow), row_policy=_split)
    chosen = class_plans(topology, [(4000, 1500)])[RowClass.SPLIT]
    assert chosen.context in ("ring_kv", "pass_q")


def test_latent_keys_are_expanded_only_for_many_rows() -> None:
    """Absorbed queries cost more for each pair, expansion costs once for each key."""
    mla = MLAConfig(
        q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=12
    )
    topology = auto((1, 2, 2), LinkCosts(alpha=0.0, beta=1e18, flops=1e9))
    model = dataclasses.replace(topology.model, num_kv_heads=1, head_dim=16, mla=mla)
    topology = dataclasses.replace(topology, model=model, row_policy=_split)
    assert class_plans(topology, [(512, 4)])[RowClass.SPLIT].context in ("gather_q", "pass_q")
    assert class_plans(topology, [(512, 2000)])[RowClass.SPLIT].context in ("gather_kv", "ring_kv")


def test_the_trace_names_the_choice_and_what_the_others_would_cost() -> None:
    topology = dataclasses.replace(auto((1, 4, 4), LinkCosts()), row_policy=_split)
    reasons = plan(make_batch(topology, [(100, 40)]), topology).reasons
    (reason,) = (text for text in reasons if "split rows" in text)
    assert reason.startswith("group 0, split rows: the cheapest of 5: ")
    for name in ("gather_kv", "ring_kv", "gather_q + ag_rs", "gather_q + a2a", "pass_q"):
        assert name in reason
    assert reason.count(" bytes)") == 5


def _split(requests, topology):  # type: ignore[no-untyped-def]
    return _all(requests, RowClass.SPLIT)


def _copy(requests, topology):  # type: ignore[no-untyped-def]
    return _all(requests, RowClass.COPY)


def _all(requests, row_class):  # type: ignore[no-untyped-def]
    from heddle.layout.rows import RowRequest
    from heddle.step.placement import Placed

    return Placed(tuple(RowRequest(len(r.token_ids), row_class) for r in requests), ())
