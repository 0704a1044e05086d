"""The reasons of a group are those that were given: new rows first, then class by class."""

from __future__ import annotations

from heddle.layout.rows import RowClass
from heddle.step.class_plan import ClassPlan, GroupPlan


def test_reasons_keep_their_order_and_empty_ones_are_left_out() -> None:
    classes = {
        RowClass.COPY: ClassPlan(row_class=RowClass.COPY, context="local"),
        RowClass.SPLIT: ClassPlan(row_class=RowClass.SPLIT, reason="keys are few"),
        RowClass.WHOLE: ClassPlan(row_class=RowClass.WHOLE, reason="it lives there"),
    }
    group = GroupPlan(classes=classes, new_rows="halo", halo_rows=3, new_rows_reason="a window")
    assert group.reasons == ("a window", "keys are few", "it lives there")
    assert GroupPlan(classes=classes, new_rows="none").reasons == group.reasons[1:]
