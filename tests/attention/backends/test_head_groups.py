from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.backends.head_groups import HeadGroup, group_runs
from heddle.layout.heads import HeadRun


@st.composite
def run_lists(draw):
    """Ascending runs with holes between lanes, and kv heads that repeat, follow or jump."""
    runs, lane, kv_index = [], 0, 0
    for _ in range(draw(st.integers(0, 6))):
        lane += draw(st.integers(0, 1))
        length = draw(st.integers(1, 3))
        runs.append(HeadRun(kv_index, lane, lane + length))
        lane += length
        kv_index += draw(st.integers(0, 2))
    return runs


def lanes_of_runs(runs):
    return [(lane, run.kv_index) for run in runs for lane in range(run.start, run.end)]


@given(run_lists())
def test_groups_map_every_lane_as_the_runs_do(runs):
    query = torch.arange(40).view(1, 40, 1)
    rows = torch.arange(20).view(1, 20, 1)
    found = []
    for group in group_runs(runs):
        lanes, heads = group.queries(query), group.heads(rows)  # [1, Kg, G, 1], [1, Kg, 1]
        assert lanes.shape[1] == heads.shape[1] == group.num_kv
        for place in range(group.num_kv):
            found += [(lane, int(heads[0, place])) for lane in lanes[0, place].flatten().tolist()]
    assert found == lanes_of_runs(runs)


def test_even_heads_are_one_group():
    runs = [HeadRun(0, 0, 3), HeadRun(1, 3, 6), HeadRun(2, 6, 9)]
    assert group_runs(runs) == [HeadGroup(kv_start=0, num_kv=3, start=0, run_lanes=3)]


def test_uneven_runs_pads_and_repeated_heads_part_groups():
    assert len(group_runs([HeadRun(0, 0, 3), HeadRun(1, 3, 4)])) == 2
    assert len(group_runs([HeadRun(0, 0, 2), HeadRun(1, 3, 5)])) == 2
    assert len(group_runs([HeadRun(0, 0, 2), HeadRun(0, 2, 4)])) == 2
    assert group_runs([]) == []
