"""Lanes cut what ranks hold, the same way for every number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.layout.kv import KVLayout
from heddle.step.lanes import MergeLanes
from tests.support.batches import make_topology


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 60))
def test_each_position_lies_in_its_lane_on_its_rank(
    ranks: int, per_place: int, run: int, length: int
) -> None:
    """Found the long way: positions of a lane, in order, among those of its rank, in order."""
    lanes = MergeLanes(ranks * per_place, ranks, run)
    layout = lanes.layout(KVLayout(ranks, run, run))
    seen = 0
    for place in range(ranks):
        stored = [t for t in range(length) if t // run % ranks == place]
        for lane in lanes.held_by(place):
            mine = [t for t in range(length) if t // run % (ranks * per_place) == lane]
            assert layout.local_len(length, lane) == len(mine)
            local = lanes.local_index(np.arange(len(mine)), lane)
            assert [stored[index] for index in local] == mine
            seen += len(mine)
    assert seen == length


def test_a_group_without_lanes_keeps_its_start_rank() -> None:
    layout = KVLayout(4, 2, 4, start_rank=3)
    assert MergeLanes(4, 4, 1).layout(layout) is layout


@pytest.mark.parametrize(("lanes", "expected"), [(None, 2), (2, 2), (4, 4), (6, 6)])
def test_lanes_are_those_asked_for_or_ranks(lanes: int | None, expected: int) -> None:
    found = MergeLanes.of(make_topology((2, 1, 2), lanes=lanes), 0)
    assert (found.num_lanes, found.num_places, found.per_place) == (expected, 2, expected // 2)
