"""The writes of a DCP group add up to the word that the layout predicts, and to no other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heddle.step.coverage import describe_stray, expected_coverage, mix
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


ROWS = (np.full(6, 7), np.arange(6) + 3, np.arange(6) * 5 + 2)


def difference(request: np.ndarray, position: np.ndarray, slot: np.ndarray) -> int:
    """Of a sum over these rows from the one that was due."""
    return (mix(request, position, slot) - mix(*ROWS)) % 2**64


@given(st.integers(0, 5), st.integers(0, 1 << 30))
def test_the_slot_that_a_row_went_to_is_read_off_the_sum(row: int, slot: int) -> None:
    wrong = ROWS[2].copy()
    wrong[row] = slot
    assume(slot != ROWS[2][row])
    found = describe_stray(difference(ROWS[0], ROWS[1], wrong), *ROWS)
    assert found == f"position {row + 3} of request 7 went to slot {slot} instead of {row * 5 + 2}"


@pytest.mark.parametrize("row", range(6))
def test_rows_that_are_lost_or_doubled_are_named(row: int) -> None:
    lost = [np.delete(values, row) for values in ROWS]
    doubled = [np.append(values, values[row]) for values in ROWS]
    place = f"position {row + 3} of request 7"
    assert describe_stray(difference(*lost), *ROWS) == f"{place} was not written"
    assert describe_stray(difference(*doubled), *ROWS) == f"{place} was written twice"


def test_two_errors_at_once_are_not_guessed_at() -> None:
    wrong = ROWS[2].copy()
    wrong[[1, 4]] = wrong[[4, 1]]
    assert describe_stray(difference(ROWS[0], ROWS[1], wrong), *ROWS) == ""
