"""Laws: for every layout each row attends to the keys that one plain sort chooses, and to no other;
rows with at most k keys attend to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from heddle.layout.mesh import legal_dcp_sizes
from heddle.layout.rows import RowClass
from heddle.step.batch import GlobalBatch
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.attention.sparse.bench import (
    HEADS,
    TOP_K,
    chosen_keys,
    dense,
    draw_sequences,
    run_ranks,
    sparse_topology,
)
from tests.support.batches import make_batch, whole_in_turn

SIZES = [
    (tp, pcp, dcp)
    for tp in (1, 2, 3, 4)
    for pcp in (1, 2, 3, 4)
    if tp * pcp <= 4
    for dcp in legal_dcp_sizes(tp, pcp)
]
MIXED = [(37, 1), (0, 19), (21, 2), (3, 1), (26, 11)]
"""(cached, new): decodes long and short, prompts with and without context."""


def check(topology: Topology, batch: GlobalBatch, *, has_ties: bool, top_k: int = TOP_K) -> None:
    """Every rank's rows and choices equal the dense oracle."""
    found = draw_sequences(batch, has_ties=has_ties)
    results = run_ranks(topology, batch, found)
    met: set[tuple[int, int, int]] = set()
    for result in results:
        first, last = result.heads
        valid = {place for place, _, _ in result.rows}
        for place, request, row in result.rows:
            keys = chosen_keys(found, request, row, top_k)
            assert result.chosen[request, row] == keys
            expected = dense(found, request, row, keys)[first:last]
            difference = (result.out[place, : last - first] - expected).abs().max()
            assert difference <= 1e-12, (request, row)
            met |= {(request, row, head) for head in range(first, last)}
        pads = [place for place in range(len(result.out)) if place not in valid]
        assert (result.out[pads] == 0).all(), "pad rows hold zeros"
        assert (result.out[:, last - first :] == 0).all(), "pad lanes hold zeros"
    rows = sum(len(request.token_ids) for request in batch.requests)
    assert len(met) == rows * HEADS


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_layout_chooses_and_attends_as_a_plain_sort_does(
    sizes: tuple[int, int, int],
) -> None:
    topology = sparse_topology(sizes, interleave=2, return_exchange="auto")
    batch = make_batch(topology, MIXED)
    assert len(set(plan(batch, topology).classes)) == 2
    check(topology, batch, has_ties=True)
    check(topology, batch, has_ties=False)


@pytest.mark.parametrize("exchange", ["ag_rs", "ag_ar", "a2a"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 4), (1, 4, 2)], ids=str)
def test_every_way_back_serves(sizes: tuple[int, int, int], exchange: str) -> None:
    topology = sparse_topology(sizes, return_exchange=exchange)
    check(topology, make_batch(topology, MIXED[1:3]), has_ties=True)


@pytest.mark.parametrize("lengths", [[(30, 1)], [(0, 1)], [(0, 40)], [(9, 1), (40, 1)]], ids=str)
def test_batches_of_one_kind(lengths: Sequence[tuple[int, int]]) -> None:
    """Decodes only, a first token (all other ranks are empty), one prompt."""
    topology = sparse_topology((2, 2, 4), interleave=4)
    check(topology, make_batch(topology, lengths), has_ties=True)


def test_whole_requests_and_copies_of_long_prompts() -> None:
    topology = sparse_topology((1, 3, 3), row_policy=whole_in_turn)
    batch = make_batch(topology, [(9, 7), (0, 12), (20, 5), (2, 1)])
    assert set(plan(batch, topology).classes) == {RowClass.WHOLE, RowClass.SPLIT, RowClass.COPY}
    check(topology, batch, has_ties=True)


@pytest.mark.parametrize("start_rank", [1, 2])
def test_chains_may_start_on_any_rank(start_rank: int) -> None:
    topology = sparse_topology((1, 3, 3), interleave=2)
    batch = make_batch(topology, MIXED)
    first, *others = batch.requests
    turned = msgspec.structs.replace(
        first, start_rank=start_rank, layout_fingerprint=topology.fingerprint(start_rank)
    )
    batch = msgspec.structs.replace(batch, requests=(turned, *others))
    check(topology, batch, has_ties=True)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 4)], ids=str)
def test_rows_with_few_keys_attend_to_all_of_them(sizes: tuple[int, int, int]) -> None:
    topology = sparse_topology(sizes, top_k=64)
    batch = make_batch(topology, MIXED)
    found = draw_sequences(batch, has_ties=False)
    for result in run_ranks(topology, batch, found):
        first, last = result.heads
        for place, request, row in result.rows:
            cached = batch.requests[request].num_computed_tokens
            expected = dense(found, request, row, range(cached + row + 1))[first:last]
            assert (result.out[place, : last - first] - expected).abs().max() <= 1e-12


def test_one_rank_sends_nothing_and_larger_groups_do() -> None:
    calls = {}
    for sizes in ((1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2), (2, 2, 4)):
        topology = sparse_topology(sizes)
        batch = make_batch(topology, [(30, 1), (0, 20)])
        results = run_ranks(topology, batch, draw_sequences(batch, has_ties=True))
        calls[sizes] = {result.num_calls for result in results}
    assert calls == {
        (1, 1, 1): {0},
        (2, 1, 1): {0},
        # Each class: query, lists, lse, sum. PCP adds new rows, and index queries once; COPY rows
        # need no queries but those of the slice.
        (2, 1, 2): {8},
        (1, 2, 1): {1},
        (1, 2, 2): {1 + 3 + 5},
        (2, 2, 4): {1 + 4 + 5},
    }


def test_a_broken_sequence_breaks_no_other() -> None:
    topology = sparse_topology((1, 2, 2))
    batch = make_batch(topology, [(30, 1), (25, 1), (0, 12)])
    found = draw_sequences(batch, has_ties=True)
    good = run_ranks(topology, batch, found)
    found.latent[1][4] = torch.nan
    found.index_key[1][4] = torch.nan
    for before, after in zip(good, run_ranks(topology, batch, found), strict=True):
        for place, request, _ in after.rows:
            if request == 1:
                assert after.out[place].isnan().all()
            else:
                assert torch.equal(after.out[place], before.out[place])
