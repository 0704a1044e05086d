"""What a configuration becomes: the exchange of each row class, one interned layout per start."""

from __future__ import annotations

import pytest

from heddle.layout.mesh import Mesh
from heddle.layout.rows import RowClass
from heddle.step.topology import default_row_policy, select_context_exchange, select_copy_exchange
from tests.support.batches import make_topology


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "asked", "expected"),
    [
        (1, 1, 1, "auto", "local"),
        (2, 1, 2, "auto", "ag_rs"),
        (1, 2, 2, "auto", "ag_ar"),
        (2, 2, 4, "auto", "ag_ar"),
        (2, 2, 4, "a2a", "a2a"),
        (1, 2, 2, "ag_rs", "ag_rs"),
    ],
)
def test_the_way_back_of_copied_rows(
    tp: int, pcp: int, dcp: int, asked: str, expected: str
) -> None:
    mesh = Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp)
    assert select_copy_exchange(asked, mesh) == expected


@pytest.mark.parametrize(
    ("dcp", "asked", "expected"),
    [(1, "auto", "local"), (2, "auto", "gather_kv"), (2, "gather_q", "gather_q")],
)
def test_the_way_context_is_met(dcp: int, asked: str, expected: str) -> None:
    mesh = Mesh(tp_size=1, pcp_size=2, dcp_size=dcp)
    assert select_context_exchange(asked, mesh) == expected


def test_a_prompt_is_split_from_two_rows_per_rank_on() -> None:
    classes = [default_row_policy(0, rows, 3).row_class for rows in (1, 5, 6, 50)]
    assert classes == [RowClass.COPY, RowClass.COPY, RowClass.SPLIT, RowClass.SPLIT]


def test_layouts_are_interned_and_fingerprints_tell_starts_apart() -> None:
    topology = make_topology((1, 4, 4))
    assert topology.kv_layout(3) is topology.kv_layout(3)
    assert topology.kv_layout(3).start_rank == 3
    assert len({topology.fingerprint(start) for start in range(4)}) == 4
