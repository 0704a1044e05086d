"""Bytes and calls counted on the wire equal the formulas, per exchange, on every rank.

The expectations are written out per layer; `step.cost` must say the same.
"""

from __future__ import annotations

import pytest
import torch

from heddle.attention.exchange import EXCHANGES
from heddle.step.cost import (
    FREE,
    Cost,
    ExchangeShape,
    context_gather,
    new_kv_gather,
    partials_return,
    query_gather,
)
from heddle.step.plan import plan
from tests.support.attention_bench import (
    call_gqa,
    gqa_truth,
    make_mla_call,
    mla_case,
    mla_truth,
    run_ranks,
)
from tests.support.batches import make_batch, make_topology

SIZES = [(2, 1, 2), (4, 1, 2), (4, 1, 4), (1, 2, 2), (2, 2, 2), (2, 2, 4), (3, 2, 6)]
WIDTH, HEADS, KV_HEADS, ELEMENT = 8, 12, 4, 4
DECODES = [(9, 1), (30, 1), (14, 1)]


def counted(records: list, kinds: tuple[str, ...]) -> Cost:
    chosen = [record for record in records if record.kind in kinds]
    return Cost(len(chosen), sum(int(record.bytes_received) for record in chosen))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_rows(sizes: tuple[int, int, int], exchange: str) -> None:
    tp, pcp, dcp = sizes
    topology = make_topology(sizes, copy_exchange=exchange)
    batch = make_batch(topology, DECODES)
    truth = gqa_truth(topology, batch, torch.float32)
    n, h, k, replicas = len(DECODES), HEADS // tp, max(1, dcp // pcp), min(pcp, dcp)
    own = n * h
    query = (k - 1) * own * WIDTH * ELEMENT
    back = {
        "ag_rs": (dcp - 1) * own * (4 * k + WIDTH * 4),
        "ag_ar": (dcp - 1) * own * k * 4 + 2 * (dcp - 1) * own * k * WIDTH * 4 // dcp,
        "a2a": (dcp - 1) * own * (WIDTH * 4 + 4),
    }[exchange]
    calls = (1 if k > 1 else 0) + (1 if exchange == "a2a" else 2)
    shape = ExchangeShape(
        num_replicas=replicas,
        slice_size=k,
        num_rows=n,
        lanes=h,
        query_width=WIDTH,
        partial_width=WIDTH,
        element_bytes=ELEMENT,
    )
    predicted = query_gather(shape, copied=True) + partials_return(exchange, shape, copied=True)
    assert predicted == Cost(calls, query + back)
    for result in run_ranks(topology, batch, truth, call_gqa, "torch"):
        assert counted(result.trace.records, ("dcp", "slice")) == predicted
        assert counted(result.trace.records, ("pcp",)) == FREE


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_rows_whose_queries_travel(sizes: tuple[int, int, int], exchange: str) -> None:
    tp, pcp, dcp = sizes
    topology = make_topology(sizes, context_exchange="gather_q", merge_exchange=exchange)
    batch = make_batch(topology, [(20, 24)])
    truth = gqa_truth(topology, batch, torch.float32)
    n, h, k = 24 // pcp, HEADS // tp, max(1, dcp // pcp)
    out = {
        "ag_rs": WIDTH * ELEMENT + 4 * dcp + WIDTH * 4,
        "ag_ar": WIDTH * ELEMENT + 4 * dcp + 2 * WIDTH * 4,
        "a2a": WIDTH * ELEMENT + WIDTH * 4 + 4,
    }[exchange]
    shape = ExchangeShape(
        num_replicas=min(pcp, dcp),
        slice_size=k,
        num_rows=n,
        lanes=h,
        query_width=WIDTH,
        partial_width=WIDTH,
        element_bytes=ELEMENT,
    )
    predicted = query_gather(shape, copied=False) + partials_return(exchange, shape, copied=False)
    assert predicted == Cost(2 if exchange == "a2a" else 3, (dcp - 1) * n * h * out)
    stored = KV_HEADS * k // tp
    new_kv = new_kv_gather(pcp, n, stored, 2 * WIDTH, ELEMENT)
    assert new_kv.received_bytes == (pcp - 1) * n * stored * 2 * WIDTH * ELEMENT
    for result in run_ranks(topology, batch, truth, call_gqa, "torch"):
        assert counted(result.trace.records, ("dcp", "slice")) == predicted
        assert counted(result.trace.records, ("pcp",)) == new_kv


@pytest.mark.parametrize("workspace", [8, 1000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_rows_whose_context_is_gathered(
    sizes: tuple[int, int, int], workspace: int
) -> None:
    tp, pcp, dcp = sizes
    topology = make_topology(sizes, workspace=workspace)
    batch = make_batch(topology, [(20, 24)])
    truth = gqa_truth(topology, batch, torch.float32)
    stored = KV_HEADS * max(1, dcp // pcp) // tp
    period = dcp
    room = max(workspace, period) // period * period
    shares = [-(-min(room, 20 - start) // dcp) for start in range(0, 20, room)]
    expected = Cost(
        len(shares), sum((dcp - 1) * share * stored * 2 * WIDTH * ELEMENT for share in shares)
    )
    predicted = FREE
    for chunk in plan(batch, topology).context_chunks:
        predicted += context_gather(dcp, chunk.padded_local_rows, stored, 2 * WIDTH, ELEMENT)
    assert predicted == expected
    for result in run_ranks(topology, batch, truth, call_gqa, "torch"):
        assert counted(result.trace.records, ("dcp", "slice")) == expected


def test_latent_rows_travel_as_latents() -> None:
    """MLA moves the latent (width 14 here), never up-projected keys, and absorbed queries."""
    topology, ups = mla_case(make_topology((2, 2, 4), copy_exchange="a2a"))
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


def test_one_rank_moves_nothing() -> None:
    topology = make_topology((1, 1, 1))
    batch = make_batch(topology, [(20, 24), (9, 1)])
    truth = gqa_truth(topology, batch, torch.float32)
    (result,) = run_ranks(topology, batch, truth, call_gqa, "torch")
    assert result.trace.records == []
    assert result.error < 1e-4
