"""Every so many steps one sequence is looked at, by turns, of those that one rank can follow."""

from __future__ import annotations

from typing import Any

import pytest

from heddle.config import SamplingParams
from heddle.engine.shadow.choosing import ProbeChooser, collect_probe
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request
from heddle.step.batch import GlobalBatch, RankReply, SampledToken, ScheduledRequest
from heddle.step.probe import NO_PROBE, Probed


def request_of(id_: int, params: SamplingParams | None = None, **changes: Any) -> Request:
    return Request(
        request_id=id_,
        prompt_token_ids=(5, 6, 7),
        params=params or SamplingParams(temperature=0.0),
        max_output_tokens=9,
        **changes,
    )


def part_of(request: Request, *, samples: bool = True, drafts: tuple[int, ...] = ()) -> Any:
    return ScheduledPart(request, 2, 1 + len(drafts), samples, drafts)


def step_of(*parts: ScheduledPart) -> ScheduledBatch:
    return ScheduledBatch(parts=parts)


PLAIN = step_of(*(part_of(request_of(id_)) for id_ in (1, 2, 3)))


def test_every_third_step_looks_at_the_next_sequence() -> None:
    chooser = ProbeChooser(3)
    chosen = [chooser.choose(PLAIN) for _ in range(12)]
    assert [id_ != NO_PROBE for id_ in chosen] == [False, False, True] * 4
    assert sorted(set(chosen[2::3])) == [1, 2, 3]


def test_without_looks_nothing_is_chosen() -> None:
    chooser = ProbeChooser(0)
    assert [chooser.choose(PLAIN) for _ in range(5)] == [NO_PROBE] * 5


def test_a_turn_waits_for_a_sequence_that_fits() -> None:
    unfit = step_of(
        part_of(request_of(1, adapter_slot=0)),
        part_of(request_of(2), samples=False),
    )
    chooser = ProbeChooser(2)
    assert [chooser.choose(unfit) for _ in range(4)] == [NO_PROBE] * 4
    assert chooser.choose(step_of(part_of(request_of(7)))) == 7
    assert chooser.choose(step_of(part_of(request_of(7)))) == NO_PROBE


def collect(part: ScheduledPart, *sampled: SampledToken) -> Probed | None:
    id_ = part.request.request_id
    scheduled = ScheduledRequest(
        request_id=id_,
        token_ids=part.token_ids,
        num_computed_tokens=2,
        packed_tables=(),
        layout_fingerprint=0,
    )
    batch = GlobalBatch(epoch=2, step=8, requests=(scheduled,), probe=id_)
    reply = RankReply(epoch=2, step=8, digest=0, coverage=(), probe=((0, b"row"),))
    return collect_probe(step_of(part), batch, [reply], sampled, first_rank=3)


TOKEN = SampledToken(request_id=4, token_id=9, logits=b"numbers")


def test_a_row_is_told_with_all_tokens_before_it() -> None:
    found = collect(part_of(request_of(4), drafts=(8, 8)), TOKEN)
    assert found is not None
    assert found.token_ids == (5, 6, 7)
    assert (found.epoch, found.step, found.token_id, found.logits) == (2, 8, 9, b"numbers")
    assert found.layers == {0: {3: b"row"}}
    assert (found.num_prompt_tokens, found.rope_length, found.is_greedy) == (3, 11, True)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
        {"allowed_token_ids": [3]},
        {"bad_words": ["a"]},
    ],
    ids=str,
)
def test_answers_in_which_something_else_had_a_say_are_not_greedy(params: dict[str, Any]) -> None:
    request = request_of(4, SamplingParams(**({"temperature": 0.0} | params)))
    found = collect(part_of(request), TOKEN)
    assert found is not None
    assert not found.is_greedy


def test_a_forced_answer_is_not_greedy() -> None:
    found = collect(part_of(request_of(4, teacher=(1, 2))), TOKEN)
    assert found is not None
    assert not found.is_greedy


def test_a_row_without_numbers_is_none() -> None:
    part = part_of(request_of(4))
    assert collect(part) is None
    assert collect(part, SampledToken(request_id=4, token_id=9)) is None
    bad = SampledToken(request_id=4, token_id=None, finite=False, logits=b"numbers")
    assert collect(part, bad) is None
