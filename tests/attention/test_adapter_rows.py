"""Rows by adapter: each row in one group at most, runs without copies."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.adapter_rows import AdapterRows


@given(st.lists(st.integers(-1, 3), max_size=12))
def test_groups_hold_the_rows_of_their_slot_and_no_others(slots: list[int]) -> None:
    found = AdapterRows.of(np.array(slots, dtype=np.int64))
    places = torch.arange(len(slots))
    groups = () if found is None else found.groups
    by_slot = {slot: places[rows].tolist() for slot, rows in groups}
    used = sorted({slot for slot in slots if slot >= 0})
    assert by_slot == {slot: [row for row, own in enumerate(slots) if own == slot] for slot in used}
    assert (found is None) == (not used)


def test_a_run_is_a_slice() -> None:
    found = AdapterRows.of(np.array([-1, 2, 2, 0, -1, 0]))
    assert found is not None
    (first, scattered), (second, run) = found.groups
    assert (first, second, run) == (0, 2, slice(1, 3))
    assert isinstance(scattered, torch.Tensor)
