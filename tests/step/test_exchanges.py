"""Which exchanges are on offer for which rows, and what one that does not fit means."""

from __future__ import annotations

from typing import Any

import pytest

from heddle.step.exchanges import (
    RETURNS,
    ExchangeSizes,
    context_candidates,
    partials_return,
    returns_candidates,
    usable_returns,
)
from heddle.step.topology import Topology
from tests.support.batches import make_topology

SIZES = [(2, 1, 2), (4, 1, 4), (1, 2, 2), (2, 2, 4), (1, 4, 2), (1, 3, 3), (5, 2, 10)]


def sizes_of(sizes: tuple[int, int, int], **fields: Any) -> ExchangeSizes:
    return ExchangeSizes.of(make_topology(sizes, **fields), tp_rank=0)


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_on_offer_is_usable(sizes: tuple[int, int, int], is_copy: bool) -> None:
    found = sizes_of(sizes)
    candidates = returns_candidates(found, is_copy=is_copy)
    assert len(set(candidates)) == len(candidates) >= 2
    for name in candidates:
        assert usable_returns(name, found, is_copy=is_copy) == (name, "")


@pytest.mark.parametrize(
    ("sizes", "is_copy", "returns", "why"),
    [
        ((1, 2, 2), True, "a2a_fine", ""),
        ((2, 2, 4), True, "a2a_fine", ""),
        ((1, 4, 2), True, "a2a_fine", ""),
        ((2, 2, 4), False, "a2a", "a2a_fine is for copied rows"),
        ((4, 1, 4), True, "a2a", "a2a_fine is for rows that several PCP ranks hold"),
        ((5, 2, 10), True, "a2a", "a2a_fine would cut 3 head lanes in 2"),
    ],
    ids=str,
)
def test_fine_blocks_where_they_fit(
    sizes: tuple[int, int, int], is_copy: bool, returns: str, why: str
) -> None:
    found = sizes_of(sizes)
    assert usable_returns("a2a_fine", found, is_copy=is_copy) == (returns, why)
    assert ("a2a_fine" in returns_candidates(found, is_copy=is_copy)) == (returns == "a2a_fine")


def test_other_ways_back_fit_everywhere() -> None:
    for sizes in SIZES:
        for name in RETURNS[:3]:
            assert usable_returns(name, sizes_of(sizes), is_copy=False) == (name, "")


def test_context_on_offer() -> None:
    assert context_candidates(sizes_of((2, 2, 4))) == ("gather_kv", "ring_kv", "gather_q", "pass_q")
    replicated = sizes_of((2, 2, 4), replicates_queries=True)
    assert context_candidates(replicated) == ("gather_kv", "ring_kv", "gather_q")


def test_lanes_leave_one_way() -> None:
    """The one that gives the bits of a group of one, for latents too."""
    found = sizes_of((2, 2, 4), lanes=8)
    assert found.merge_lanes == 2
    assert context_candidates(found) == ("gather_kv",)
    for is_copy in (False, True):
        assert returns_candidates(found, is_copy=is_copy) == ("a2a",)


@pytest.mark.parametrize(("sizes", "group"), [((1, 4, 2), "dcp"), ((2, 2, 4), "pcp")], ids=str)
def test_fine_blocks_are_shared_with_the_pcp_ranks_of_the_group(
    sizes: tuple[int, int, int], group: str
) -> None:
    """Of DCP 2 in PCP 4 those are the DCP group itself."""
    topology: Topology = make_topology(sizes)
    found = ExchangeSizes.of(topology, tp_rank=0)
    _, share = partials_return("a2a_fine", 3, found, is_copy=True)
    assert (share.op, share.group) == ("all_gather", group)
    assert share.shape == (3, topology.heads.lanes // 2, 8)
