"""Which node each rank lives on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heddle.engine.executors.ray_nodes import Node, describe_hosts, place_ranks
from heddle.errors import ConfigError

CPUS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def nodes_of(cpus: list[int], own: int = 0) -> list[Node]:
    """Nodes n0, n1, ...; the driver lives on one of them."""
    return [
        Node(f"n{place}", f"10.0.0.{place}", count, 1000 + place, place == own)
        for place, count in enumerate(cpus)
    ]


def names(cpus: list[int], world_size: int, cpus_per_rank: int = 1, own: int = 0) -> list[str]:
    placed = place_ranks(nodes_of(cpus, own), world_size, cpus_per_rank)
    return [node.node_id for node in placed]


@pytest.mark.parametrize(
    ("cpus", "own", "world_size", "expected"),
    [
        ([4, 8], 0, 4, "n0 n0 n0 n0"),  # together, on the driver's
        ([4, 8], 1, 4, "n1 n1 n1 n1"),
        ([4, 8], 0, 6, "n1 n1 n1 n1 n1 n1"),  # together elsewhere
        ([4, 4, 4], 1, 6, "n1 n1 n1 n0 n0 n0"),  # even, neighbours together, as few as hold them
        ([1, 4, 4], 0, 8, "n0 n1 n1 n1 n1 n2 n2 n2"),
        ([0, 2, 2], 0, 4, "n1 n1 n2 n2"),  # a driver's node without CPUs takes none
    ],
)
def test_ranks_stay_together_then_even(
    cpus: list[int], own: int, world_size: int, expected: str
) -> None:
    assert names(cpus, world_size, own=own) == expected.split()


@given(cpus=CPUS, own=st.integers(0, 4), world_size=st.integers(1, 40), each=st.integers(1, 4))
def test_every_rank_has_a_place_and_no_node_more_than_its_room(
    cpus: list[int], own: int, world_size: int, each: int
) -> None:
    room = [count // each for count in cpus]
    assume(sum(room) >= world_size)
    found = names(cpus, world_size, each, own % len(cpus))
    assert len(found) == world_size
    counts = [found.count(f"n{place}") for place in range(len(cpus))]
    assert all(count <= space for count, space in zip(counts, room, strict=True))
    # A node is left once: its ranks are neighbours.
    changes = sum(before != after for before, after in pairwise(found))
    assert changes == len(set(found)) - 1


@given(cpus=CPUS, world_size=st.integers(1, 40))
def test_threads_that_follow_from_a_placement_do_not_change_it(
    cpus: list[int], world_size: int
) -> None:
    assume(sum(cpus) >= world_size)
    surveyed = place_ranks(nodes_of(cpus), world_size, 1)
    hosts = describe_hosts(surveyed)
    threads = max(1, hosts.num_cores // hosts.ranks_on_host)  # as `layout.resolve` counts
    assert place_ranks(nodes_of(cpus), world_size, threads) == surveyed


def test_hosts_are_described_by_their_narrowest() -> None:
    own, other, third = nodes_of([4, 3, 8])
    alone = describe_hosts([own, own])
    assert (alone.ranks_on_host, alone.num_cores) == (2, 4)
    assert (alone.free_memory_bytes, alone.refusal) == (None, None)
    several = describe_hosts([own, own, other, third])
    assert (several.ranks_on_host, several.num_cores, several.free_memory_bytes) == (2, 3, 1001)
    assert several.refusal == "Ray has placed ranks on 3 hosts"
    elsewhere = describe_hosts([third])
    assert elsewhere.refusal == "Ray has placed the ranks on another host than the driver's"


def test_a_cluster_without_room_is_refused_with_its_size() -> None:
    words = r"5 ranks of 2 CPUs each are not legal .* room for 3 of them, on 2 nodes with 7 CPUs"
    with pytest.raises(ConfigError, match=words):
        place_ranks(nodes_of([3, 4]), 5, 2)
    with pytest.raises(ConfigError, match="on 0 nodes with 0 CPUs"):
        place_ranks([], 1, 1)
