"""What copied rows meet, lane by lane: each visible key once, whether rows come alone or together.

Ranks without lanes are held against the rule of visibility in `test_localize`.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.layout.rows import RowClass, RowRequest
from heddle.step.local_copy import CopiedRows
from heddle.step.localize import localize
from heddle.step.placement import Placed
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.batches import RULES, make_batch, make_topology
from tests.support.visible import seen_by


def all_copied(requests, topology):  # type: ignore[no-untyped-def]
    return Placed(tuple(RowRequest(len(r.token_ids), RowClass.COPY) for r in requests), ())


def met_keys(topology: Topology, lengths: list[tuple[int, int]], place: int) -> list[list[int]]:
    """Positions that each row meets on a rank, from its views; [0, 200) is dealt in runs."""
    step_plan = plan(make_batch(topology, lengths), topology)
    step = localize(step_plan, topology, topology.mesh.groups("dcp")[0][place])
    ranks, run = topology.groups[0].world_size, topology.interleave_size
    here = place if ranks > 1 else 0
    stored = [t for t in range(400) if t // run % ranks == here]
    found: list[list[int]] = [[] for _ in range(step.num_copy)]
    for part in CopiedRows(step, topology, 0).parts():
        for view in part.views:
            picked = view.keys.picked
            rows = range(view.keys.start, view.keys.end)
            if picked is not None:
                rows = [view.keys.start + int(index) for index in picked]
            for row in range(part.start, part.end):
                first = int(view.ranges.first[row - part.start])
                end = int(view.ranges.end[row - part.start])
                found[row] += [stored[index] for index in rows[first:end]]
    return found


@given(
    st.sampled_from(RULES),
    st.sampled_from([None, 4, 8]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_every_visible_key_is_met_once_on_all_ranks_together(
    rule,
    lanes: int | None,
    lengths: list[tuple[int, int]],  # type: ignore[no-untyped-def]
) -> None:
    topology = make_topology((1, 4, 4), interleave=2, rule=rule, row_policy=all_copied)
    topology = dataclasses.replace(topology, lanes=lanes, return_exchange="a2a")
    places = [met_keys(topology, lengths, place) for place in range(4)]
    positions = [cached + i for cached, new in lengths for i in range(new)]
    for row, position in enumerate(positions):
        seen = seen_by(rule, position)
        if topology.groups[0].world_size == 1:
            assert all(sorted(found[row]) == seen for found in places)
        else:
            assert sorted(key for found in places for key in found[row]) == seen


@pytest.mark.parametrize("cached", [0, 5, 30])
def test_rows_that_come_together_meet_what_they_meet_alone(cached: int) -> None:
    topology = make_topology((1, 2, 2), row_policy=all_copied)
    together = met_keys(topology, [(cached, 3)], 0)
    alone = [met_keys(topology, [(cached + i, 1)], 0)[0] for i in range(3)]
    assert together == alone
