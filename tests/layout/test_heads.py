"""Laws M7 and M8: the head map, and what a layout stores."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import TopologyError
from heddle.layout.heads import HeadLayout, HeadRun
from heddle.layout.mesh import Mesh, legal_dcp_sizes


def head_layout(q: int, kv: int, tp: int, k: int = 1) -> HeadLayout:
    return HeadLayout(num_query_heads=q, num_kv_heads=kv, tp_size=tp, slice_size=k)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[HeadLayout, Mesh]:
    kv, ratio = draw(st.integers(1, 8)), draw(st.integers(1, 7))
    tp, pcp = draw(st.integers(1, min(12, kv * ratio))), draw(st.integers(1, 4))
    dcp = draw(st.sampled_from(legal_dcp_sizes(tp, pcp)))
    mesh = Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp)
    return head_layout(kv * ratio, kv, tp, mesh.slice_size), mesh


def global_kv(heads: HeadLayout, head: int) -> int:
    """Query head j reads kv head floor(j * K / H)."""
    return head * heads.num_kv_heads // heads.num_query_heads


@given(layouts())
def test_query_heads_partition_over_tp_and_slices_are_unions(case: tuple[HeadLayout, Mesh]) -> None:
    heads, _ = case
    ranges = [heads.query_range(rank) for rank in range(heads.tp_size)]
    assert [head for start, end in ranges for head in range(start, end)] == list(
        range(heads.num_query_heads)
    )
    sizes = [end - start for start, end in ranges]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert heads.lanes == max(sizes)


@given(layouts())
def test_a_slice_stores_exactly_the_kv_heads_its_query_heads_read(
    case: tuple[HeadLayout, Mesh],
) -> None:
    heads, mesh = case
    for slice_index in range(mesh.num_slices):
        read = {
            global_kv(heads, head)
            for rank in range(heads.tp_size)
            if mesh.slice_of(rank) == slice_index
            for head in range(*heads.query_range(rank))
        }
        assert set(range(*heads.kv_range(slice_index))) == read
        assert heads.num_stored_kv_heads(slice_index) == len(read)


@given(layouts())
def test_all_ranks_of_a_dcp_group_hold_one_kv_set(case: tuple[HeadLayout, Mesh]) -> None:
    heads, mesh = case
    for group in mesh.groups("dcp"):
        tp_ranks = {mesh.coord_of(rank).tp for rank in group}
        assert len({heads.kv_range(mesh.slice_of(tp)) for tp in tp_ranks}) == 1


@given(layouts())
def test_each_lane_finds_its_global_kv_head(case: tuple[HeadLayout, Mesh]) -> None:
    heads, mesh = case
    for rank in range(heads.tp_size):
        first_head, end_head = heads.query_range(rank)
        first_kv, _ = heads.kv_range(mesh.slice_of(rank))
        seen = {
            lane: first_kv + run.kv_index
            for run in heads.runs(rank)
            for lane in range(run.start, run.end)
        }
        expected = {
            head - first_head: global_kv(heads, head) for head in range(first_head, end_head)
        }
        assert seen == expected  # and so no pad lane is in a run


@given(layouts())
def test_slice_runs_are_the_ranks_runs_side_by_side(case: tuple[HeadLayout, Mesh]) -> None:
    heads, mesh = case
    k = mesh.slice_size
    for slice_index in range(mesh.num_slices):
        expected = {
            place * heads.lanes + lane: run.kv_index
            for place in range(k)
            for run in heads.runs(slice_index * k + place)
            for lane in range(run.start, run.end)
        }
        runs = heads.slice_runs(slice_index)
        found = {lane: run.kv_index for run in runs for lane in range(run.start, run.end)}
        assert found == expected
        for before, after in itertools.pairwise(runs):
            assert before.end <= after.start
            assert before.kv_index != after.kv_index or before.end < after.start  # maximal runs


@given(layouts())
def test_fraction_and_copies_equal_a_count(case: tuple[HeadLayout, Mesh]) -> None:
    heads, mesh = case
    # With as many tokens as ranks in a DCP group and interleave 1, each rank stores one token.
    stored = [
        mesh.dcp_size * [0] for _ in range(heads.num_kv_heads)
    ]  # [kv head][token]: ranks that hold it
    per_rank = []
    for rank in range(mesh.world_size):
        token = mesh.position("dcp", rank)
        kv_heads = range(*heads.kv_range(mesh.slice_of(mesh.coord_of(rank).tp)))
        per_rank.append(len(kv_heads))
        for head in kv_heads:
            stored[head][token] += 1
    elements = heads.num_kv_heads * mesh.dcp_size
    assert heads.kv_fraction(mesh.dcp_size) == Fraction(max(per_rank), elements)
    total = sum(map(sum, stored))
    assert heads.kv_copies(mesh.pcp_size, mesh.dcp_size) == Fraction(total, elements)
    assert min(map(min, stored)) >= 1


@pytest.mark.parametrize(
    ("q", "kv", "slices", "queries", "kv_sets"),
    [
        (9, 3, 2, [(0, 4), (4, 9)], [(0, 2), (1, 3)]),
        (14, 2, 4, [(0, 3), (3, 7), (7, 10), (10, 14)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (28, 4, 3, [(0, 9), (9, 18), (18, 28)], [(0, 2), (1, 3), (2, 4)]),
    ],
)
def test_uneven_cuts_table(
    q: int,
    kv: int,
    slices: int,
    queries: list[tuple[int, int]],
    kv_sets: list[tuple[int, int]],
) -> None:
    heads = head_layout(q, kv, slices)
    assert [heads.query_range(rank) for rank in range(slices)] == queries
    assert [heads.kv_range(index) for index in range(slices)] == kv_sets


def test_two_ranks_of_one_slice_share_all_kv_heads() -> None:
    heads = head_layout(9, 3, tp=2, k=2)
    assert [heads.query_range(rank) for rank in (0, 1)] == [(0, 4), (4, 9)]
    assert heads.kv_range(0) == (0, 3)
    assert heads.lanes == 5
    assert heads.runs(0) == (HeadRun(0, 0, 3), HeadRun(1, 3, 4))
    # Lane 4 is rank 0's pad, so kv head 1 has two runs.
    assert heads.slice_runs(0) == (
        HeadRun(0, 0, 3),
        HeadRun(1, 3, 4),
        HeadRun(1, 5, 7),
        HeadRun(2, 7, 10),
    )
    assert heads.pad_waste == Fraction(1, 10)


def test_runs_join_across_ranks_without_a_pad_between() -> None:
    assert head_layout(8, 1, tp=2, k=2).slice_runs(0) == (HeadRun(0, 0, 8),)


def test_partner_ranks_hold_the_same_kv_head() -> None:
    heads = head_layout(24, 4, tp=8, k=2)
    assert heads.query_range(5) == (15, 18)
    assert heads.kv_range(5 // 2) == (2, 3) == heads.kv_range(4 // 2)


@pytest.mark.parametrize(
    ("q", "kv", "tp", "pcp", "expected"),
    [
        (64, 4, 8, 1, {1: ("1/4", 2), 2: ("1/8", 1), 4: ("1/8", 1), 8: ("1/8", 1)}),
        (64, 8, 4, 2, {1: ("1/4", 2), 2: ("1/8", 1), 4: ("1/8", 1), 8: ("1/8", 1)}),
        (128, 1, 8, 1, {1: ("1", 8), 2: ("1/2", 4), 4: ("1/4", 2), 8: ("1/8", 1)}),
    ],
)
def test_storage_table(
    q: int, kv: int, tp: int, pcp: int, expected: dict[int, tuple[str, int]]
) -> None:
    for dcp, (fraction, copies) in expected.items():
        slice_size = Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp).slice_size
        heads = head_layout(q, kv, tp, slice_size)
        assert heads.kv_fraction(dcp) == Fraction(fraction)
        assert heads.kv_copies(pcp, dcp) == copies


def test_misuse_is_refused_in_words() -> None:
    with pytest.raises(TopologyError, match="10 query heads; must be a multiple"):
        head_layout(10, 3, 1)
    with pytest.raises(TopologyError, match=r"tp_size=10; must be in \[1, 9\], a head per rank"):
        head_layout(9, 3, 10)
    with pytest.raises(TopologyError, match="slice_size=3; must divide tp_size=4"):
        head_layout(8, 2, 4, 3)
    with pytest.raises(ValueError, match=r"tp_rank=2; must be in \[0, 2\)"):
        head_layout(9, 3, 2).query_range(2)
    with pytest.raises(ValueError, match=r"slice_index=1; must be in \[0, 1\)"):
        head_layout(9, 3, 2, 2).slice_runs(1)
