"""The records of steps say what the plan says."""

from __future__ import annotations

from heddle.engine.trace import StepRecord
from heddle.step.plan import plan
from tests.support.batches import by_length, make_batch, make_topology


def test_a_record_has_the_rows_and_the_reasons_of_its_plan() -> None:
    topology = make_topology((1, 2, 2), return_exchange="auto", row_policy=by_length)
    step_plan = plan(make_batch(topology, [(0, 9), (30, 1), (20, 1)], step=7), topology)
    record = StepRecord.of(1, step_plan)
    assert (record.replica, record.step, record.num_requests, record.num_rows) == (1, 7, 3, 11)
    assert record.row_classes == (("split", 1), ("copy", 2))
    (reason,) = record.reasons
    assert reason.startswith("group 0, copy rows: the cheapest of 3: ")
