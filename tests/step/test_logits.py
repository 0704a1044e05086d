"""Rows that feed the head arrive in batch order, and cross PCP only when they must."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heddle.layout.rows import RowClass, RowRequest, classify, create_row_layout
from heddle.step.logits import plan_logits


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(list(RowClass))), min_size=1, max_size=5
    ),
    st.data(),
)
def test_gathered_rows_come_back_in_the_order_asked_for(
    pcp_size: int, shapes: list[tuple[int, RowClass]], data: st.DataObject
) -> None:
    requests = [
        RowRequest(count, row_class, index % pcp_size)
        for index, (count, row_class) in enumerate(shapes)
    ]
    rows = create_row_layout(requests, pcp_size)
    wanted = data.draw(st.lists(st.integers(0, rows.num_rows - 1), unique=True, max_size=8))
    found = plan_logits(wanted, rows)
    local = [rows.local_rows(rank) for rank in range(pcp_size)]
    sent = [local[rank][found.local_rows[rank]] for rank in range(pcp_size)]
    pool = np.concatenate(sent) if found.crosses_pcp else sent[0]
    assert pool[found.order].tolist() == wanted
    assert all(len(part) == found.num_padded for part in sent)


def test_last_rows_of_split_and_decode_requests_do_not_cross() -> None:
    requests = [RowRequest(17, RowClass.SPLIT), RowRequest(1, RowClass.COPY)]
    rows = create_row_layout(requests, 4)
    assert not plan_logits([16, 17], rows).crosses_pcp
    assert plan_logits([3, 16], rows).crosses_pcp


def test_no_rows_wanted() -> None:
    rows = create_row_layout([RowRequest(5, RowClass.SPLIT)], 2)
    found = plan_logits([], rows)
    assert (found.num_rows, found.num_padded, found.crosses_pcp) == (0, 0, False)


def test_rows_of_drafts_cross_only_where_they_are_dealt_out() -> None:
    def rows_of(count: int, pcp_size: int) -> bool:
        layout = create_row_layout(
            [RowRequest(9, RowClass.SPLIT), RowRequest(count, classify(count, pcp_size))], pcp_size
        )
        return plan_logits(range(9, 9 + count), layout).crosses_pcp

    assert [rows_of(count, 2) for count in (1, 2, 3, 4, 5)] == [False, False, False, True, True]
    assert [rows_of(count, 4) for count in (5, 7, 8)] == [False, False, True]
    assert not rows_of(9, 1)
