"""A write that is lost stops the step."""

from __future__ import annotations

import msgspec
import pytest

from heddle.errors import PlanMismatch
from heddle.step.agree import check_coverage
from heddle.step.batch import RankReply
from heddle.step.coverage import expected_coverage
from heddle.step.local_group import localize_group
from heddle.step.localize import localize
from heddle.step.plan import plan
from tests.support.batches import make_batch, make_topology

TOPOLOGY = make_topology((2, 2, 2))
BATCH = make_batch(TOPOLOGY, [(3, 9), (5, 1)], step=4)
PLAN = plan(BATCH, TOPOLOGY)
COVERAGE = expected_coverage(BATCH, TOPOLOGY)


def good_replies() -> list[RankReply]:
    return [
        RankReply(
            epoch=0,
            step=4,
            digest=PLAN.digest,
            coverage=(localize_group(localize(PLAN, TOPOLOGY, rank), TOPOLOGY, 0).coverage,),
        )
        for rank in range(4)
    ]


def test_good_replies_pass() -> None:
    assert check_coverage(good_replies(), BATCH, COVERAGE, TOPOLOGY) is None


def test_a_missing_write_is_named_by_group() -> None:
    replies = good_replies()
    replies[3] = msgspec.structs.replace(replies[3], coverage=(0,))
    with pytest.raises(PlanMismatch, match=r"ranks \[1, 3\] wrote KV of cache group 0"):
        check_coverage(replies, BATCH, COVERAGE, TOPOLOGY)
