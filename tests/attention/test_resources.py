"""Head maps and exchanges of a rank follow from its place."""

from __future__ import annotations

import pytest

from heddle.attention.backends import create_backend
from heddle.attention.resources import AttentionResources
from heddle.comm.base import RankGroups
from heddle.comm.solo import SoloCommunicator
from heddle.layout.heads import HeadRun
from tests.support.batches import make_topology


def make_resources(sizes: tuple[int, int, int], tp_rank: int) -> AttentionResources:
    solo = SoloCommunicator()
    return AttentionResources(
        make_topology(sizes),
        None,  # type: ignore[arg-type]
        RankGroups(tp=solo, pcp=solo, dcp=solo, slice=solo, pp=solo, ep=solo),
        create_backend("reference"),
        tp_rank,
    )


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_after_a_gather_over_the_slice_all_of_its_heads_are_here(tp_rank: int) -> None:
    """12 query and 4 kv heads on tp 2, dcp 2: both ranks store all kv heads and own 6 queries."""
    resources = make_resources((2, 1, 2), tp_rank)
    first = 2 * tp_rank
    assert list(resources.own_runs) == [HeadRun(first, 0, 3), HeadRun(first + 1, 3, 6)]
    assert list(resources.gathered_runs) == [HeadRun(i, 3 * i, 3 * i + 3) for i in range(4)]


def test_without_a_slice_the_gathered_heads_are_the_own_heads() -> None:
    resources = make_resources((2, 2, 2), 1)
    assert list(resources.gathered_runs) == list(resources.own_runs)
    assert list(resources.own_runs) == [HeadRun(0, 0, 3), HeadRun(1, 3, 6)]


def test_head_maps_are_made_once() -> None:
    """128 heads take half a millisecond, and every layer asks."""
    resources = make_resources((2, 1, 2), 0)
    assert resources.own_runs is resources.own_runs
    assert resources.gathered_runs is resources.gathered_runs


def test_nothing_is_exchanged_in_a_group_of_one() -> None:
    resources = make_resources((1, 1, 1), 0)
    assert resources.exchange("a2a") is None
    assert resources.exchange("none") is None
