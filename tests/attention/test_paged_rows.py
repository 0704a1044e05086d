"""Stored rows met in place: plans hold every key once, and change nothing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.paged_rows import RowView, paged_plans
from heddle.step.views import LocalRange, Ranges

BLOCK = 4
TABLES = (np.arange(10, 30), np.arange(40, 60)[::-1].copy())


@st.composite
def cut_ranges(draw: st.DrawFn) -> tuple[list[RowView], dict[int, list[int]]]:
    """Ranges of some rows, each cut into views in any order; (views, slots that each row meets)."""
    views: list[RowView] = []
    met: dict[int, list[int]] = {}
    for row in range(draw(st.integers(1, 4))):
        table = draw(st.sampled_from(TABLES))
        cuts = sorted(draw(st.lists(st.integers(0, 60), min_size=2, max_size=4, unique=True)))
        skipped = draw(st.integers(0, 2))
        met[row] = []
        for number, (start, end) in enumerate(pairwise(cuts)):
            if number == skipped:
                continue
            keys = LocalRange(table, max(start - 1, 0), end + 1)
            offset = start - keys.start
            ranges = Ranges(np.array([offset]), np.array([offset + end - start]))
            rows = draw(st.sampled_from([slice(row, row + 1), np.array([row])]))
            views.append(RowView(rows, keys, ranges))
            met[row] += [int(table[i // BLOCK]) * BLOCK + i % BLOCK for i in range(start, end)]
    return draw(st.permutations(views)), met


@given(cut_ranges())
def test_plans_hold_every_key_of_every_row_exactly_once(
    case: tuple[list[RowView], dict[int, list[int]]],
) -> None:
    views, met = case
    plans = paged_plans(views, len(met), BLOCK)
    assert plans
    found: dict[int, list[int]] = {row: [] for row in met}
    for plan in plans:
        for row in found:
            table = plan.block_tables[plan.table_of_row[row]]
            indices = range(int(plan.first[row]), int(plan.end[row]))
            found[row] += [int(table[i // BLOCK]) * BLOCK + i % BLOCK for i in indices]
    assert {row: sorted(slots) for row, slots in found.items()} == {
        row: sorted(slots) for row, slots in met.items()
    }


def test_ranges_that_follow_each_other_are_one_plan() -> None:
    rows = slice(0, 2)
    views = [
        RowView(rows, LocalRange(TABLES[0], 0, 8), Ranges(np.array([0, 2]), np.array([8, 8]))),
        RowView(rows, LocalRange(TABLES[0], 8, 16), Ranges(np.array([0, 0]), np.array([8, 5]))),
    ]
    plans = paged_plans(views, 3, BLOCK)
    assert plans is not None
    (plan,) = plans
    assert plan.first.tolist() == [0, 2, 0]
    assert plan.end.tolist() == [16, 13, 0]


@pytest.mark.parametrize("picked", [np.array([0, 2])])
def test_picked_rows_have_no_plan(picked: np.ndarray) -> None:
    keys = LocalRange(TABLES[0], 0, 4, picked)
    assert (
        paged_plans([RowView(slice(0, 1), keys, Ranges(np.array([0]), np.array([2])))], 1, BLOCK)
        is None
    )
