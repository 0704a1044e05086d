from __future__ import annotations

import pytest

from heddle.config import SamplingParams
from heddle.errors import PlanMismatch
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request
from heddle.scheduler.results import append_tokens, check_tokens


def part_of(drafts=(5, 6), samples=True, limit=9, **params):
    request = Request(
        request_id=3,
        prompt_token_ids=(1, 2),
        params=SamplingParams(**params),
        max_output_tokens=limit,
        output_token_ids=[4],
    )
    return ScheduledPart(request, 2, 1 + len(drafts), samples, tuple(drafts))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((), "request 3 sampled, but no token came back"),
        ((5, 6, 7, 8), "request 3 got 4 tokens from 3 rows"),
        ((5, 7, 8), r"request 3 got \[5, 7, 8\] after the drafts \[5, 6\]"),
    ],
)
def test_tokens_that_no_run_of_drafts_explains_are_refused(found, message):
    batch = ScheduledBatch((part_of(),))
    with pytest.raises(PlanMismatch, match=message):
        check_tokens(batch, {3: found}, ())
    check_tokens(batch, {3: found}, failed=[3])


@pytest.mark.parametrize("found", [(9,), (5, 9), (5, 6, 9)])
def test_each_right_draft_brings_one_token_more(found):
    part = part_of()
    check_tokens(ScheduledBatch((part,)), {3: found}, ())
    assert append_tokens(part, found) == (len(found) - 1, None)
    assert part.request.output_token_ids == [4, *found]


def test_what_owes_no_token_is_not_asked_for_one():
    for part in (part_of(samples=False), part_of(limit=0)):
        check_tokens(ScheduledBatch((part,)), {}, ())
    assert append_tokens(part_of(samples=False), ()) == (0, None)
    assert append_tokens(part_of(limit=0), ()) == (0, ("length", None))


def test_the_first_token_that_ends_the_request_is_the_last():
    part = part_of(stop_token_ids=(5,))
    assert append_tokens(part, (5, 6, 9)) == (0, ("stop", 5))
    assert part.request.output_token_ids == [4, 5]
    part = part_of(limit=3)
    assert append_tokens(part, (5, 6, 9)) == (1, ("length", None))
    assert part.request.output_token_ids == [4, 5, 6]
