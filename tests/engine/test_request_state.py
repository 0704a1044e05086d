from __future__ import annotations

from typing import Any

from heddle.config import SamplingParams
from heddle.engine.answer import Answer
from heddle.engine.counters import Counters
from heddle.engine.outputs import RequestMetrics
from heddle.engine.request_state import RequestState
from heddle.layout.kv import KVLayout
from heddle.scheduler.request import Request
from heddle.step.batch import SampledToken, TokenLogprobs


def state(n: int = 1, **fields: Any) -> RequestState:
    params = SamplingParams(n=n, **fields)
    sequences = [
        Request(
            request_id=choice,
            prompt_token_ids=(5, 6, 7),
            params=params,
            max_output_tokens=4,
            kv_layout=KVLayout(1, 1, 4),
            choice=choice,
        )
        for choice in range(n)
    ]
    return RequestState(
        request_id="0",
        prompt=None,
        prompt_token_ids=(5, 6, 7),
        params=params,
        metrics=RequestMetrics(arrival_time=1.0),
        sequences=sequences,
        answers=[Answer(index=i, params=params, tokenizer=None, assembler=None) for i in range(n)],
    )


def push(answer: Answer, token_id: int, reason: Any = None) -> None:
    answer.add(SampledToken(request_id=0, token_id=token_id), reason, None)


def entry(token_id: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token_id, logprob=logprob, rank=1, top_token_ids=(), top_logprobs=()
    )


def test_request_is_finished_when_all_answers_are() -> None:
    request = state(n=2)
    push(request.answers[0], 9, "length")
    assert not request.is_finished
    push(request.answers[1], 9, "stop")
    assert request.is_finished


def test_final_only_tells_nothing_before_the_end() -> None:
    request = state(output_kind="final_only")
    push(request.answers[0], 9)
    assert request.output() is None
    push(request.answers[0], 8, "length")
    output = request.output()
    assert output is not None
    assert output.outputs[0].token_ids == (9, 8)
    assert output.finished


def test_prompt_logprobs_stand_at_their_positions_whatever_the_order() -> None:
    request = state(prompt_logprobs=0)
    request.add_prompt_logprobs(2, [entry(7, -2.0)], None)
    request.add_prompt_logprobs(1, [entry(6, -1.0), entry(7, -2.0)], None)
    output = request.output()
    assert output is not None
    assert output.prompt_logprobs is not None
    first, second, third = output.prompt_logprobs
    assert first is None
    assert second is not None
    assert third is not None
    assert (second[6].logprob, third[7].logprob) == (-1.0, -2.0)
    plain = state().output()
    assert plain is not None
    assert plain.prompt_logprobs is None


def test_times_and_preemptions() -> None:
    request = state(n=2)
    request.note_token(2.0)
    request.note_token(3.0)
    request.sequences[0].num_preemptions = 1
    request.sequences[1].num_preemptions = 2
    request.note_finished(4.0)
    assert request.metrics == RequestMetrics(
        arrival_time=1.0, first_token_time=2.0, finished_time=4.0, num_preemptions=3
    )


def test_drafts_add_up_over_steps_and_answers() -> None:
    request = state(n=2)
    assert request.metrics.draft_acceptance is None
    request.note_drafts(0, 1)
    assert request.metrics.draft_acceptance is None
    request.note_drafts(4, 4)
    request.note_drafts(3, 1)
    request.note_drafts(1, 0)
    assert (request.metrics.num_drafts, request.metrics.num_accepted_drafts) == (8, 3)
    assert request.metrics.draft_acceptance == 3 / 8
    counters = Counters()
    counters.count_request(request)
    assert (counters.totals()["drafts"], counters.totals()["accepted"]) == (8, 3)


def test_counters_know_every_name_from_the_start_and_add_up() -> None:
    counters = Counters()
    assert set(counters.totals().values()) == {0}
    request = state(n=2)
    request.sequences[0].num_cached_tokens = 2
    push(request.answers[0], 9, "length")
    push(request.answers[1], 9)
    push(request.answers[1], 9, "stop")
    counters.count_request(request)
    totals = counters.totals()
    assert totals["prompt_tokens"] == totals["prefix_cache_queries"] == 3
    assert totals["prefix_cache_hits"] == 2
    assert totals["generation_tokens"] == 3
    assert (totals["requests_stop"], totals["requests_length"]) == (1, 1)
    totals["steps"] = 99
    assert counters.totals()["steps"] == 0
