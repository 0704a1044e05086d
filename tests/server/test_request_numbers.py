"""Times and sizes of a request that has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from heddle.config import SamplingParams
from heddle.engine.answer import Answer
from heddle.engine.outputs import RequestMetrics
from heddle.engine.request_state import RequestState
from heddle.scheduler.request import Request
from heddle.server.request_numbers import add, note_request, sizes_of, times_of
from tests.server.test_engine_watch import Recorded

TIMES = RequestMetrics(arrival_time=10.0, first_token_time=13.0, finished_time=18.0)


def ended(metrics: RequestMetrics = TIMES, *lengths: int, **params: Any) -> RequestState:
    lengths = lengths or (6,)
    params = {"max_tokens": 9, "n": len(lengths), **params}
    asked = SamplingParams(**params)
    prompt = (1,) * 20
    request = Request(request_id=0, prompt_token_ids=prompt, params=asked, max_output_tokens=9)
    request.num_cached_tokens = 8
    answers = [
        Answer(index=index, params=asked, tokenizer=None, assembler=None)
        for index in range(len(lengths))
    ]
    for answer, length in zip(answers, lengths, strict=True):
        answer.token_ids = [1] * length
        answer.finish_reason = "length"
    return RequestState(
        request_id="0",
        prompt=None,
        prompt_token_ids=prompt,
        params=asked,
        metrics=metrics,
        sequences=[request],
        answers=answers,
    )


def test_parts_of_a_life_add_up() -> None:
    assert times_of(ended(), begin=11.0) == {
        "e2e_request_latency_seconds": 8.0,
        "request_queue_time_seconds": 1.0,
        "request_inference_time_seconds": 7.0,
        "time_to_first_token_seconds": 3.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 5.0,
        "request_time_per_output_token_seconds": 1.0,
    }


def test_what_never_came_has_no_time() -> None:
    no_token = replace(TIMES, first_token_time=None)
    assert set(times_of(ended(no_token, 0), begin=11.0)) == {
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
    }
    one = times_of(ended(TIMES, 1), begin=11.0)
    assert "request_time_per_output_token_seconds" not in one


def test_sizes_are_of_all_answers() -> None:
    assert sizes_of(ended(TIMES, 2, 5)) == {
        "request_prompt_tokens": 20,
        "request_generation_tokens": 7,
        "request_max_num_generation_tokens": 5,
        "request_params_n": 2,
        "request_num_preemptions": 0,
        "request_prefill_kv_computed_tokens": 12,
        "request_params_max_tokens": 9,
    }
    assert "request_params_max_tokens" not in sizes_of(ended(max_tokens=None))


def test_drafts_count_when_there_were_any() -> None:
    values = Recorded()
    note_request(values, ended(), 0, 11.0)
    assert ("spec_decode_num_draft_tokens", 0) not in values.cells
    note_request(values, ended(replace(TIMES, num_drafts=5, num_accepted_drafts=3)), 0, 11.0)
    assert values.value("spec_decode_num_draft_tokens") == 5
    assert values.value("spec_decode_num_accepted_tokens") == 3
    assert values.value("request_success", "length") == 2


def test_nothing_makes_no_row() -> None:
    values = Recorded()
    add(values, "prompt_tokens", 0, 0)
    assert not values.cells
    add(values, "prompt_tokens", 1, 2)
    assert values.value("prompt_tokens", replica=1) == 2
