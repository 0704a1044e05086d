from __future__ import annotations

from heddle.config import SamplingParams
from heddle.engine.counters import Counters
from heddle.layout.kv import KVLayout
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request


def part(num_rows: int) -> ScheduledPart:
    request = Request(
        request_id=0,
        prompt_token_ids=(1,) * 9,
        params=SamplingParams(),
        max_output_tokens=1,
        kv_layout=KVLayout(1, 1, 4),
    )
    return ScheduledPart(request, 0, num_rows, samples=False)


def test_steps_count_global_rows_and_preemptions() -> None:
    counters = Counters()
    counters.count_step(ScheduledBatch((part(4), part(5)), preempted=(3, 4)))
    counters.count_step(ScheduledBatch((part(1),)))
    totals = counters.totals()
    assert (totals["steps"], totals["rows"], totals["preemptions"]) == (2, 10, 2)
