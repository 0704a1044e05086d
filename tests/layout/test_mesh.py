"""Laws M1 to M5: ranks, groups, legal DCP sizes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import TopologyError
from heddle.layout.mesh import (
    GROUP_KINDS,
    PLANE_KINDS,
    Coord,
    Mesh,
    divisors,
    legal_dcp_sizes,
)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    tp, pcp = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    outer = [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (3, 2, 1), (2, 3, 1), (1, 2, 2), (3, 3, 2)]
    pp, dp, external_dp = draw(st.sampled_from(outer))
    return Mesh(
        tp_size=tp,
        pcp_size=pcp,
        dcp_size=draw(st.sampled_from(legal_dcp_sizes(tp, pcp))),
        pp_size=pp,
        dp_size=dp,
        external_dp_size=external_dp,
    )


def walked_groups(tp: int, pcp: int, dcp: int) -> list[list[tuple[int, int]]]:
    """DCP groups as (pcp, tp) places, by walking PCP first and then TP; the oracle of this file."""
    walk = [(ci, ti) for ti in range(tp) for ci in range(pcp)]
    return [walk[start : start + dcp] for start in range(0, tp * pcp, dcp)]


def is_rectangle(group: list[tuple[int, int]]) -> bool:
    rows, columns = {ci for ci, _ in group}, {ti for _, ti in group}
    return set(group) == set(product(rows, columns))


@given(meshes())
def test_rank_is_a_bijection_of_coordinates(mesh: Mesh) -> None:
    coords = [mesh.coord_of(rank) for rank in range(mesh.world_size)]
    assert len(set(coords)) == mesh.world_size
    assert [mesh.rank_of(coord) for coord in coords] == list(range(mesh.world_size))


@given(meshes())
def test_coordinates_count_with_tp_fastest(mesh: Mesh) -> None:
    sizes = (mesh.external_dp_size, mesh.dp_size, mesh.pp_size, mesh.pcp_size, mesh.tp_size)
    for rank, places in enumerate(product(*map(range, sizes))):
        assert mesh.coord_of(rank) == Coord(*places)


@given(meshes())
def test_each_group_kind_tiles_the_world(mesh: Mesh) -> None:
    sizes = {
        "tp": mesh.tp_size,
        "pcp": mesh.pcp_size,
        "dcp": mesh.dcp_size,
        "slice": mesh.slice_size,
        "pp": mesh.pp_size,
        "ep": mesh.world_size // mesh.pp_size // mesh.external_dp_size,
    }
    for kind in GROUP_KINDS:
        groups = mesh.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {sizes[kind]} == {mesh.group_size(kind)}


@given(meshes())
def test_position_is_the_index_in_the_ordered_list(mesh: Mesh) -> None:
    for kind in GROUP_KINDS:
        for rank in range(mesh.world_size):
            group = mesh.group_of(kind, rank)
            assert group in mesh.groups(kind)
            assert group.index(rank) == mesh.position(kind, rank)


@given(meshes())
def test_groups_vary_along_their_axes_only(mesh: Mesh) -> None:
    free = {
        "tp": ("tp",),
        "pcp": ("pcp",),
        "dcp": ("pcp", "tp"),
        "slice": ("tp",),
        "pp": ("pp",),
        "ep": ("dp", "pcp", "tp"),
    }
    assert set(free) == set(GROUP_KINDS)
    for kind, axes in free.items():
        for group in mesh.groups(kind):  # type: ignore[arg-type]
            coords = [mesh.coord_of(rank) for rank in group]
            for axis in set(Coord.__slots__) - set(axes):
                assert len({getattr(coord, axis) for coord in coords}) == 1


@given(meshes())
def test_groups_are_the_ranks_that_agree_on_the_other_axes_in_walking_order(mesh: Mesh) -> None:
    """Counted by hand: the members are all ranks that differ along the named axes only."""
    axes = {"tp": ["tp"], "pcp": ["pcp"], "pp": ["pp"], "ep": ["dp", "pcp", "tp"]}
    for kind, varied in axes.items():
        fixed = [axis for axis in Coord.__slots__ if axis not in varied]
        runs: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for rank in range(mesh.world_size):
            at = mesh.coord_of(rank)
            key = tuple(getattr(at, axis) for axis in fixed)
            order = tuple(getattr(at, axis) for axis in varied)
            runs.setdefault(key, []).append((order, rank))
        expected = {tuple(rank for _, rank in sorted(run)) for run in runs.values()}
        assert list(mesh.groups(kind)) == sorted(expected)  # type: ignore[arg-type]


@given(meshes())
def test_dcp_groups_walk_pcp_first_then_tp_in_every_plane(mesh: Mesh) -> None:
    plane_size = mesh.tp_size * mesh.pcp_size
    walked = walked_groups(mesh.tp_size, mesh.pcp_size, mesh.dcp_size)
    expected = [
        tuple(start + ci * mesh.tp_size + ti for ci, ti in group)
        for start in range(0, mesh.world_size, plane_size)
        for group in walked
    ]
    assert list(mesh.groups("dcp")) == expected


@given(meshes())
def test_replicas_tile_the_world_and_hold_whole_planes(mesh: Mesh) -> None:
    replicas = [mesh.ranks_of_replica(dp) for dp in range(mesh.dp_size)]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(mesh.world_size))
    for dp, ranks in enumerate(replicas):
        assert {mesh.replica_of(rank) for rank in ranks} == {mesh.coord_of(ranks[0]).dp} == {dp}
        for kind in (*PLANE_KINDS, "pp"):
            assert set(mesh.group_of(kind, ranks[0])) <= set(ranks)  # type: ignore[arg-type]


@given(meshes())
def test_the_last_stage_ends_every_pipeline(mesh: Mesh) -> None:
    for group in mesh.groups("pp"):
        assert [mesh.is_last_stage(rank) for rank in group] == [False] * (mesh.pp_size - 1) + [True]


@given(meshes())
def test_dcp_position_follows_the_closed_form(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        at, pcp, dcp = mesh.coord_of(rank), mesh.pcp_size, mesh.dcp_size
        inside = pcp % dcp == 0
        expected = at.pcp % dcp if inside else (at.tp % (dcp // pcp)) * pcp + at.pcp
        position = mesh.position("dcp", rank)
        assert position == expected
        assert position % mesh.num_replicas == at.pcp % mesh.num_replicas
        assert position // mesh.num_replicas == mesh.position("slice", rank)


@given(meshes())
def test_slice_is_the_part_of_a_dcp_group_with_one_pcp_place(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        at = mesh.coord_of(rank)
        mine = [r for r in mesh.group_of("dcp", rank) if mesh.coord_of(r).pcp == at.pcp]
        assert mesh.group_of("slice", rank) == tuple(mine)
        assert {mesh.slice_of(mesh.coord_of(r).tp) for r in mine} == {mesh.slice_of(at.tp)}
    assert mesh.num_slices * mesh.slice_size == mesh.tp_size
    assert mesh.num_replicas * mesh.slice_size == mesh.dcp_size


def test_legal_sizes_are_those_with_rectangular_groups() -> None:
    for tp, pcp in product(range(1, 13), range(1, 9)):
        tiling = [size for size in range(1, tp * pcp + 1) if tp * pcp % size == 0]
        rectangular = [
            size for size in tiling if all(map(is_rectangle, walked_groups(tp, pcp, size)))
        ]
        assert list(legal_dcp_sizes(tp, pcp)) == rectangular, (tp, pcp)


@pytest.mark.parametrize(
    ("tp", "pcp", "legal", "reference"),
    [
        (4, 1, (1, 2, 4), {1, 2, 4}),
        (4, 2, (1, 2, 4, 8), {1, 2, 8}),
        (2, 4, (1, 2, 4, 8), {1, 4, 8}),
        (4, 3, (1, 3, 6, 12), {1, 3, 12}),
        (3, 4, (1, 2, 4, 12), {1, 4, 12}),
        (4, 6, (1, 2, 3, 6, 12, 24), {1, 6, 24}),
    ],
)
def test_legal_sizes_table(tp: int, pcp: int, legal: tuple[int, ...], reference: set[int]) -> None:
    assert legal_dcp_sizes(tp, pcp) == legal
    assert reference <= set(legal)


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "groups"),
    [
        (4, 2, 2, ((0, 4), (1, 5), (2, 6), (3, 7))),
        (4, 2, 4, ((0, 4, 1, 5), (2, 6, 3, 7))),
        (4, 2, 8, ((0, 4, 1, 5, 2, 6, 3, 7),)),
        (2, 4, 2, ((0, 2), (4, 6), (1, 3), (5, 7))),
        (2, 4, 4, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (8, 1, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_dcp_groups_table(tp: int, pcp: int, dcp: int, groups: tuple[tuple[int, ...], ...]) -> None:
    assert Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp).groups("dcp") == groups


def test_axis_groups_table() -> None:
    mesh = Mesh(tp_size=4, pcp_size=2, dcp_size=4)
    assert mesh.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("pcp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("slice") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_groups_across_planes_table() -> None:
    """8 ranks of tp 2, pp 2, dp 2: stage 0 of replica 0 is R0 R1, its stage 1 is R2 R3."""
    mesh = Mesh(tp_size=2, pp_size=2, dp_size=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.position("ep", 4) == 2
    assert mesh.position("pp", 7) == 1
    apart = Mesh(pcp_size=2, dp_size=2, external_dp_size=2)
    assert apart.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert apart.ranks_of_replica(1) == (2, 3, 6, 7)


def test_rank_five_of_tp4_pcp2() -> None:
    places = []
    for dcp in (2, 4, 8):
        mesh = Mesh(tp_size=4, pcp_size=2, dcp_size=dcp)
        assert mesh.coord_of(5) == Coord(external_dp=0, dp=0, pp=0, pcp=1, tp=1)
        assert mesh.group_of("tp", 5) == (4, 5, 6, 7)
        assert mesh.group_of("pcp", 5) == (1, 5)
        places.append(mesh.position("dcp", 5))
    assert places == [1, 3, 3]


def test_divisors_are_those_that_leave_no_rest() -> None:
    for size in range(1, 200):
        assert list(divisors(size)) == [part for part in range(1, size + 1) if size % part == 0]


def test_misuse_is_refused_in_words() -> None:
    with pytest.raises(TopologyError, match=r"dcp_size=3 is not legal .* legal here: 1, 2, 4, 8"):
        Mesh(tp_size=4, pcp_size=2, dcp_size=3)
    with pytest.raises(TopologyError, match="pp_size=0; a size is at least 1"):
        Mesh(pp_size=0)
    mesh = Mesh(tp_size=4, pcp_size=2)
    with pytest.raises(ValueError, match=r"rank=8; must be in \[0, 8\)"):
        mesh.coord_of(8)
    with pytest.raises(ValueError, match=r"tp=4; must be in \[0, 4\)"):
        mesh.rank_of(Coord(0, 0, 0, 0, 4))
    with pytest.raises(ValueError, match=r"tp_rank=-1; must be in \[0, 4\)"):
        mesh.slice_of(-1)
    with pytest.raises(ValueError, match=r"dp=1; must be in \[0, 1\)"):
        mesh.ranks_of_replica(1)
    with pytest.raises(ValueError, match=r"rank=9; must be in"):
        mesh.is_last_stage(9)
