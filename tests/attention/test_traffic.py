"""Bytes and calls counted on the wire equal the formulas, per exchange, on every rank.

Expectations are written out per layer; the plan must price them alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from heddle.attention.exchange import EXCHANGES
from heddle.config.visibility import Visibility
from heddle.step.batch import GlobalBatch
from heddle.step.plan import plan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology
from heddle.step.traffic import FREE, Cost, cost_of
from tests.support.attention_bench import (
    call_gqa,
    gqa_truth,
    in_float64,
    make_mla_call,
    mla_case,
    mla_truth,
    run_ranks,
    seen_by,
)
from tests.support.batches import by_length, make_batch, make_topology
from tests.support.quantized import rounded

SIZES = [(2, 1, 2), (4, 1, 2), (4, 1, 4), (1, 2, 2), (2, 2, 2), (2, 2, 4), (3, 2, 6)]
WIDTH, HEADS, KV_HEADS, ELEMENT = 8, 12, 4, 4
DECODES = [(9, 1), (30, 1), (14, 1)]


def counted(records: list, kinds: tuple[str, ...]) -> Cost:
    chosen = [record for record in records if record.kind in kinds]
    return Cost(len(chosen), sum(int(record.bytes_received) for record in chosen))


def predicted(topology: Topology, batch: GlobalBatch, kinds: tuple[str, ...]) -> Cost:
    """What the plan says one layer costs rank 0."""
    layer = collective_schedule(plan(batch, topology), topology, 0).layers[0]
    return cost_of([call for call in layer if call.group in kinds], topology.mesh)


def run_and_check(topology: Topology, batch: GlobalBatch, expected: Cost, new_rows: Cost) -> None:
    """The plan prices these calls so, and every rank makes them."""
    truth = gqa_truth(topology, batch, torch.float32)
    assert predicted(topology, batch, ("dcp", "slice", "pcp")) == expected + new_rows
    for result in run_ranks(topology, batch, truth, call_gqa, "torch"):
        assert counted(result.trace.records, ("dcp", "slice", "pcp")) == expected + new_rows
        assert result.error < 1e-4


def pcp_gather(sizes: tuple[int, int, int], rows: int) -> Cost:
    """New KV of distributed rows, `rows` on each rank."""
    tp, pcp, dcp = sizes
    stored = KV_HEADS * max(1, dcp // pcp) // tp
    return FREE if pcp == 1 else Cost(1, (pcp - 1) * rows * stored * 2 * WIDTH * ELEMENT)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_rows(sizes: tuple[int, int, int], exchange: str) -> None:
    tp, pcp, dcp = sizes
    topology = make_topology(sizes, return_exchange=exchange, row_policy=by_length)
    n, h, k = len(DECODES), HEADS // tp, max(1, dcp // pcp)
    own, replicas = n * h, dcp // k
    a2a = Cost(1, (dcp - 1) * own * (WIDTH * 4 + 4))
    cut = Cost(1, (dcp - 1) * own * k * (WIDTH * 4 + 4) // dcp)
    back = {
        "ag_rs": Cost(2, (dcp - 1) * own * (4 * k + WIDTH * 4)),
        "ag_ar": Cost(2, (dcp - 1) * own * k * 4 + 2 * (dcp - 1) * own * k * WIDTH * 4 // dcp),
        "a2a": a2a,
        # Without PCP ranks that share the rows it means a2a.
        "a2a_fine": a2a
        if replicas == 1
        else cut + Cost(1, (replicas - 1) * (own // replicas) * WIDTH * 4),
    }[exchange]
    query = Cost(1, (k - 1) * own * WIDTH * ELEMENT) if k > 1 else FREE
    run_and_check(topology, make_batch(topology, DECODES), query + back, FREE)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_rows_whose_queries_travel(sizes: tuple[int, int, int], exchange: str) -> None:
    tp, pcp, dcp = sizes
    topology = make_topology(
        sizes, context_exchange="gather_q", return_exchange=exchange, row_policy=by_length
    )
    n, h = 24 // pcp, HEADS // tp
    out = {
        "ag_rs": WIDTH * ELEMENT + 4 * dcp + WIDTH * 4,
        "ag_ar": WIDTH * ELEMENT + 4 * dcp + 2 * WIDTH * 4,
        "a2a": WIDTH * ELEMENT + WIDTH * 4 + 4,
        "a2a_fine": WIDTH * ELEMENT + WIDTH * 4 + 4,  # of distributed rows: a2a
    }[exchange]
    expected = Cost(3 if exchange.startswith("ag") else 2, (dcp - 1) * n * h * out)
    run_and_check(topology, make_batch(topology, [(20, 24)]), expected, pcp_gather(sizes, n))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_rows_whose_queries_go_round(sizes: tuple[int, int, int]) -> None:
    tp, pcp, dcp = sizes
    topology = make_topology(sizes, context_exchange="pass_q", row_policy=by_length)
    n, h = 24 // pcp, HEADS // tp
    expected = Cost(dcp, (dcp - 1) * n * h * (WIDTH * ELEMENT + WIDTH * 4 + 4))
    run_and_check(topology, make_batch(topology, [(20, 24)]), expected, pcp_gather(sizes, n))


@pytest.mark.parametrize("workspace", [8, 1000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_rows_whose_context_is_gathered(
    sizes: tuple[int, int, int], workspace: int
) -> None:
    tp, pcp, dcp = sizes
    topology = make_topology(sizes, workspace=workspace, row_policy=by_length)
    stored = KV_HEADS * max(1, dcp // pcp) // tp
    period = dcp
    room = max(workspace, period) // period * period
    shares = [-(-min(room, 20 - start) // dcp) for start in range(0, 20, room)]
    expected = Cost(
        len(shares), sum((dcp - 1) * share * stored * 2 * WIDTH * ELEMENT for share in shares)
    )
    new_rows = pcp_gather(sizes, 24 // pcp)
    run_and_check(topology, make_batch(topology, [(20, 24)]), expected, new_rows)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_rows_whose_context_goes_round(sizes: tuple[int, int, int]) -> None:
    """Whole shards travel, whatever the workspace: N - 1 hops of the largest one."""
    tp, pcp, dcp = sizes
    topology = make_topology(sizes, workspace=8, context_exchange="ring_kv", row_policy=by_length)
    stored = KV_HEADS * max(1, dcp // pcp) // tp
    share = -(-20 // dcp)
    expected = Cost(dcp - 1, (dcp - 1) * share * stored * 2 * WIDTH * ELEMENT)
    new_rows = pcp_gather(sizes, 24 // pcp)
    run_and_check(topology, make_batch(topology, [(20, 24)]), expected, new_rows)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 1, 4), (2, 2, 4), (3, 2, 6)], ids=str)
def test_replicated_queries_are_not_gathered_over_the_slice(sizes: tuple[int, int, int]) -> None:
    """Copied rows send nothing out; distributed rows are gathered over the PCP ranks alone."""
    tp, pcp, dcp = sizes
    topology = make_topology(
        sizes,
        context_exchange="gather_q",
        return_exchange="a2a",
        replicates_queries=True,
        row_policy=by_length,
    )
    h, k = HEADS // tp, dcp // pcp
    back = (dcp - 1) * h * (WIDTH * 4 + 4)
    decodes = Cost(1, len(DECODES) * back)
    run_and_check(topology, make_batch(topology, DECODES), decodes, FREE)
    n = 24 // pcp
    query = FREE if pcp == 1 else Cost(1, (pcp - 1) * n * k * h * WIDTH * ELEMENT)
    run_and_check(
        topology, make_batch(topology, [(20, 24)]), query + Cost(1, n * back), pcp_gather(sizes, n)
    )


@pytest.mark.parametrize("lanes", [4, 12])
@pytest.mark.parametrize("sizes", [(4, 1, 2), (4, 1, 4), (1, 2, 2), (2, 2, 4)], ids=str)
def test_lanes_multiply_the_payload_of_the_way_back(
    sizes: tuple[int, int, int], lanes: int
) -> None:
    tp, pcp, dcp = sizes
    topology = make_topology(sizes, return_exchange="auto", lanes=lanes, row_policy=by_length)
    n, h, k = len(DECODES), HEADS // tp, max(1, dcp // pcp)
    query = Cost(1, (k - 1) * n * h * WIDTH * ELEMENT) if k > 1 else FREE
    back = Cost(1, (dcp - 1) * (lanes // dcp) * n * h * (WIDTH * 4 + 4))
    run_and_check(topology, make_batch(topology, DECODES), query + back, FREE)


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("rule", [Visibility("window", 32), Visibility("chunk", 32)], ids=str)
def test_a_window_brings_only_a_halo_of_new_rows(rule: Visibility, interleave: int) -> None:
    """PCP 4, 256 new rows in mirrored chunks of 32: counted pair by pair, key by key."""
    topology = make_topology((1, 4, 4), interleave=interleave, rule=rule, row_policy=by_length)
    home = [min(t // 32, 7 - t // 32) for t in range(256)]
    pairs = Counter[tuple[int, int]]()
    for rank in range(4):
        stored = {t for t in range(256) if t // interleave % 4 == rank}
        seen = {t for row in range(256) if home[row] == rank for t in seen_by(rule, row)}
        pairs.update((home[t], rank) for t in stored | seen if home[t] != rank)
    most = max(pairs.values())
    assert most < 64
    expected = Cost(1, 3 * most * KV_HEADS * 2 * WIDTH * ELEMENT)
    run_and_check(topology, make_batch(topology, [(0, 256)]), FREE, expected)


def test_latent_rows_travel_as_latents() -> None:
    """MLA moves the latent (width 14 here), never up-projected keys, and absorbed queries."""
    topology, ups = mla_case(make_topology((2, 2, 4), return_exchange="a2a", row_policy=by_length))
    batch = make_batch(topology, [(20, 24), (9, 1)])
    truth = mla_truth(topology, batch, ups)
    for result in run_ranks(topology, batch, truth, make_mla_call(ups), "torch"):
        by_call = [(r.op, r.kind, int(r.bytes_received)) for r in result.trace.records]
        assert by_call == [
            ("all_gather", "pcp", 1 * 12 * 14 * 8),
            ("all_gather", "slice", 1 * 1 * 6 * 14 * 8),
            ("all_to_all", "dcp", 3 * 1 * 6 * (10 + 1) * 8),
            ("all_gather", "dcp", 3 * 5 * 14 * 8),
        ]


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("context", ["gather_kv", "ring_kv"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 4)], ids=str)
def test_quantised_rows_travel_as_bytes_with_their_scales(
    sizes: tuple[int, int, int], context: str, dtype: str
) -> None:
    """A byte an element and two scales of four, of cached rows and of new ones."""
    tp, pcp, dcp = sizes
    asked = make_topology(sizes, workspace=1000, context_exchange=context, row_policy=by_length)
    topology = replace(asked, kv_cache_dtype=dtype)
    batch = make_batch(topology, [(20, 24)])
    stored, row = KV_HEADS * max(1, dcp // pcp) // tp, 2 * WIDTH + 8
    calls = 1 if context == "gather_kv" else dcp - 1
    expected = Cost(calls, (dcp - 1) * (20 // dcp) * stored * row)
    if pcp > 1:
        expected += Cost(1, (pcp - 1) * (24 // pcp) * stored * row)
    assert predicted(topology, batch, ("dcp", "slice", "pcp")) == expected
    truth = gqa_truth(topology, batch, torch.float32)
    exact = in_float64(topology, truth, lambda rows: rounded(rows, WIDTH, dtype))
    for result in run_ranks(topology, batch, exact, call_gqa, "torch"):
        assert counted(result.trace.records, ("dcp", "slice", "pcp")) == expected
        assert result.error < 1e-4
    assert (
        max(
            float((found - other).abs().max())
            for found, other in zip(exact.expected, truth.expected, strict=True)
        )
        > 1e-3
    ), "the rounding of rows shows"


def test_one_rank_moves_nothing() -> None:
    topology = make_topology((1, 1, 1))
    batch = make_batch(topology, [(20, 24), (9, 1)])
    truth = gqa_truth(topology, batch, torch.float32)
    (result,) = run_ranks(topology, batch, truth, call_gqa, "torch")
    assert result.trace.records == []
    assert result.error < 1e-4
