"""The writes of a DCP group add up to the word that the layout predicts, and to no other."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from heddle.step.coverage import expected_coverage, mix
from heddle.step.local_group import localize_group
from heddle.step.localize import localize
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.batches import make_batch, request_lengths, topologies


@given(topologies(), request_lengths)
def test_each_dcp_group_adds_up(topology: Topology, lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(topology, lengths)
    step_plan, expected = plan(batch, topology), expected_coverage(batch, topology)
    words = [
        localize_group(localize(step_plan, topology, rank), topology, 0).coverage
        for rank in range(topology.mesh.world_size)
    ]
    if topology.groups[0].world_size == 1:
        assert [(word,) for word in words] == [expected] * len(words)
        return
    for group in topology.mesh.groups("dcp"):
        assert (sum(words[rank] for rank in group) % 2**64,) == expected


def test_a_lost_doubled_or_misplaced_row_changes_the_sum() -> None:
    positions = np.arange(8, dtype=np.int64)
    slots = positions * 3
    whole = mix(7, positions, slots)
    assert mix(7, positions[1:], slots[1:]) != whole
    assert mix(7, np.append(positions, 3), np.append(slots, 9)) != whole
    assert mix(7, positions, slots[::-1].copy()) != whole
    assert mix(8, positions, slots) != whole


def test_the_sum_does_not_depend_on_order() -> None:
    positions = np.arange(8, dtype=np.int64)
    assert mix(7, positions[::-1].copy(), positions[::-1].copy()) == mix(7, positions, positions)
