"""A write that is lost stops the step."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from heddle.errors import PlanMismatch
from heddle.layout.mesh import Mesh
from heddle.step.agree import check_calls, check_coverage
from heddle.step.batch import RankReply
from heddle.step.coverage import expected_coverage, mix
from heddle.step.local_group import localize_group
from heddle.step.localize import localize
from heddle.step.plan import plan
from heddle.step.slots import row_slots
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


def test_the_rank_and_the_row_that_strayed_are_named() -> None:
    replies = good_replies()
    step = localize(PLAN, TOPOLOGY, 3)
    slots = localize_group(step, TOPOLOGY, 0)
    row = int(np.flatnonzero(slots.slot_mapping >= 0)[0])
    due = row_slots(step, TOPOLOGY, 0, slots.place)
    stored = np.flatnonzero(due != -1)
    first = int(stored[0])
    request, position = int(step.rows.request[first]), int(step.rows.position[first])
    wrong = due.copy()
    wrong[first] += 2
    ids = np.array([r.request_id for r in BATCH.requests])
    total = mix(ids[step.rows.request[stored]], step.rows.position[stored], wrong[stored])
    replies[3] = msgspec.structs.replace(replies[3], coverage=(total,))
    words = (
        f"it is rank 3, where position {position} of request {ids[request]} went to slot "
        f"{due[first] + 2} instead of {due[first]};"
    )
    assert row >= 0
    with pytest.raises(PlanMismatch, match=words) as caught:
        check_coverage(replies, BATCH, COVERAGE, TOPOLOGY)
    assert caught.value.kind == "coverage"


def test_ranks_whose_calls_differ_are_named() -> None:
    replies = [
        msgspec.structs.replace(reply, call_hashes={"tp": 5, "pcp": 6 + rank % 2, "dcp": 7})
        for rank, reply in enumerate(good_replies())
    ]
    check_calls(replies, TOPOLOGY)  # each PCP group has its own
    replies[2] = msgspec.structs.replace(replies[2], call_hashes={"tp": 5, "pcp": 7, "dcp": 7})
    with pytest.raises(PlanMismatch, match=r"rank 6 made other collectives in its pcp group than"):
        check_calls(replies, TOPOLOGY, first_rank=4)


def test_a_rank_that_left_a_call_out_of_its_group_is_named() -> None:
    replies = [msgspec.structs.replace(r, call_hashes={"tp": 5}) for r in good_replies()]
    check_calls(replies, TOPOLOGY)
    replies[1] = msgspec.structs.replace(replies[1], call_hashes={})
    with pytest.raises(PlanMismatch, match=r"rank 1 made other collectives in its tp group"):
        check_calls(replies, TOPOLOGY)


def test_ends_of_a_pipeline_may_differ() -> None:
    topology = dataclasses.replace(TOPOLOGY, mesh=Mesh(pp_size=2))
    reply = good_replies()[0]
    pair = [msgspec.structs.replace(reply, call_hashes={"pp": word}) for word in (3, 4)]
    assert check_calls(pair, topology) is None
