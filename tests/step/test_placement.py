"""Rows are dealt out where that pays, and attention work is even where there is enough of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.link_costs import LinkCosts
from heddle.layout.rows import RowClass, create_row_layout
from heddle.step.batch import SampleSpec
from heddle.step.draw_params import DrawParams
from heddle.step.placement import Placed, place_rows
from heddle.step.topology import Topology
from tests.support.batches import make_batch, make_topology

NO_COMM = LinkCosts(alpha=0.0, beta=1e18, request=0.0)
DEAR_COMM = LinkCosts(alpha=1.0, beta=1.0)


def placed(
    pcp: int, lengths: Sequence[tuple[int, int]], costs: LinkCosts = NO_COMM, **fields: object
) -> Placed:
    topology = dataclasses.replace(make_topology((1, pcp, pcp)), costs=costs, **fields)
    return place_rows(make_batch(topology, lengths).requests, topology)


def classes(found: Placed) -> list[RowClass]:
    return [row.row_class for row in found.rows]


def attention_work(lengths: Sequence[tuple[int, int]], found: Placed, pcp: int) -> list[int]:
    """Keys met by the rows of each rank, counted row by row, without cached context."""
    layout = create_row_layout(found.rows, pcp)
    return [
        sum(row + 1 for part in layout.segments(rank) for row in range(part.start, part.end))
        for rank in range(pcp)
    ]


def test_a_long_prompt_is_split_and_its_neighbours_are_not() -> None:
    """A decode and a tiny prompt beside 2,000 rows are not cut up with them."""
    found = placed(4, [(0, 2000), (50, 1), (0, 5)], LinkCosts())
    assert classes(found)[0] is RowClass.SPLIT
    assert RowClass.SPLIT not in classes(found)[1:]


def test_where_sending_is_dear_nothing_is_cut() -> None:
    found = placed(4, [(0, 400), (50, 1), (0, 5)], DEAR_COMM)
    assert classes(found) == [RowClass.COPY] * 3


def test_where_sending_is_free_decodes_are_dealt_out_once_arithmetic_bounds_them() -> None:
    """Below that, every rank reads all weights anyway, and sharding saves nothing."""
    topology = make_topology((1, 4, 4))
    few = placed(4, [(50, 1)] * 4, NO_COMM)
    assert classes(few) == [RowClass.COPY] * 4
    bound = int(topology.costs.flops * 4 / (2 * topology.costs.memory))
    many = placed(4, [(50, 1)] * (8 * bound), NO_COMM)
    assert set(classes(many)) == {RowClass.WHOLE}
    owners = [row.owner for row in many.rows]
    assert [owners.count(rank) for rank in range(4)] == [2 * bound] * 4


def test_what_a_request_costs_by_itself_may_outweigh_the_arithmetic_it_saves() -> None:
    """64 decodes dealt to 2 ranks are 32 attentions of one request, beside half of the products."""
    lengths = [(50, 1)] * 64
    saved = 1e-6 * int(placed(2, lengths).reasons[0].split(" save ")[1].split()[0])
    for request, wanted in ((saved / 40, RowClass.WHOLE), (saved / 25, RowClass.COPY)):
        costs = dataclasses.replace(NO_COMM, request=request)
        assert set(classes(placed(2, lengths, costs))) == {wanted}


@pytest.mark.parametrize("setting", ["copy", "whole"])
def test_decode_rows_go_where_the_user_says(setting: str) -> None:
    for costs in (NO_COMM, DEAR_COMM):
        found = placed(4, [(50, 1)] * 9, costs, decode_row_sharding=setting)
        assert set(classes(found)) == {RowClass(setting)}
        assert found.reasons == (f"decode rows: {setting}, as asked",)


def test_drafts_are_decode_rows_however_many_they_are() -> None:
    topology = dataclasses.replace(make_topology((1, 2, 2)), costs=NO_COMM)
    batch = make_batch(topology, [(50, 9), (50, 9)])
    spec = SampleSpec(params=DrawParams(), seed=0, choice=0, position=0)
    draft = msgspec.structs.replace(batch.requests[0], samples=(spec,) * 9)
    found = place_rows((draft, batch.requests[1]), topology)
    assert found.rows[0].row_class is not RowClass.SPLIT
    assert found.rows[1].row_class is RowClass.SPLIT


def test_every_choice_says_why() -> None:
    found = placed(4, [(0, 2000), (0, 3), (9, 1)], LinkCosts())
    assert [reason.partition(":")[0] for reason in found.reasons] == [
        "short prompts",
        "decode rows",
    ]
    assert all("rows dealt out save" in reason for reason in found.reasons)


lengths_without_context = st.lists(
    st.tuples(st.just(0), st.integers(1, 700)), min_size=1, max_size=9
)
prices = st.builds(
    LinkCosts,
    alpha=st.sampled_from([0.0, 1e-5, 1e-4, 1e-2]),
    beta=st.sampled_from([1e6, 1e9, 1e15]),
)


@given(st.integers(2, 4), lengths_without_context, prices)
def test_attention_work_is_even_or_the_trace_says_why(
    pcp: int, lengths: list[tuple[int, int]], costs: LinkCosts
) -> None:
    """Above 64 rows a rank within 10% of the mean, above 256 within 5%."""
    found = placed(pcp, lengths, costs)
    work = attention_work(lengths, found, pcp)
    distributed = sum(row.num_rows for row in found.rows if row.row_class is not RowClass.COPY)
    bound = 1.05 if distributed / pcp > 256 else 1.10 if distributed / pcp > 64 else None
    if bound is None or not sum(work):
        return
    copied = sum(
        row.num_rows * (row.num_rows + 1) // 2
        for row in found.rows
        if row.row_class is RowClass.COPY
    )
    shared = [load - copied for load in work]
    if max(shared) * pcp > bound * sum(shared):
        assert any(reason.startswith("balance: ") for reason in found.reasons)
        whole = [row.num_rows for row in found.rows if row.row_class is RowClass.WHOLE]
        assert max(whole, default=0) < 2 * pcp


@given(st.integers(2, 4), st.integers(0, 3), st.integers(1, 2))
def test_many_whole_prompts_end_up_even(pcp: int, extra: int, seed: int) -> None:
    """Prompts below the threshold, several for each rank: dealt out or cut, never lopsided."""
    lengths = [(0, 40 + (i * seed * 37) % 90) for i in range(4 * pcp + extra)]
    found = placed(pcp, lengths, LinkCosts(alpha=3e-4, beta=1e9))
    rows = [row for row in found.rows if row.row_class is not RowClass.COPY]
    if sum(row.num_rows for row in rows) / pcp > 64:
        work = attention_work(lengths, found, pcp)
        assert max(work) * pcp <= 1.10 * sum(work)


def test_one_rank_needs_no_choice() -> None:
    topology: Topology = make_topology((2, 1, 2))
    found = place_rows(make_batch(topology, [(0, 2000), (9, 1), (0, 1)]).requests, topology)
    assert classes(found) == [RowClass.SPLIT, RowClass.COPY, RowClass.COPY]
    assert found.reasons == ()


def test_narrow_rows_are_priced_by_their_own_width() -> None:
    """Where bytes decide, a cache of half the width cuts a prompt that a wider one leaves whole."""
    costs = LinkCosts(alpha=0.0, beta=8e6, flops=5e9)
    lengths = [(0, 300)]
    wide, narrow = (
        classes(placed(2, lengths, costs, kv_cache_dtype=dtype))
        for dtype in ("float64", "bfloat16")
    )
    assert RowClass.SPLIT in narrow
    assert RowClass.SPLIT not in wide
