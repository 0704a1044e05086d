"""Drafts change how many steps an answer takes, and nothing else that a caller can see."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config import ParallelConfig, SamplingParams, SpeculativeConfig
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import CompletionOutput, RequestOutput
from heddle.engine.tokenizer import Tokenizer
from tests.support.byte_tokenizer import byte_level
from tests.support.fake_executor import EOS, VOCAB_SIZE, FakeExecutor, resolved_config

DRAFTS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
LAYOUTS = [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4)]


def pattern_logits(tokens: Sequence[int]) -> np.ndarray:
    """Depends on the last two tokens and, a little, on all: patterns come back, but not always."""
    row = np.random.default_rng(list(tokens[-2:])).normal(size=VOCAB_SIZE)
    row += 0.15 * np.random.default_rng([len(tokens), *tokens]).normal(size=VOCAB_SIZE)
    row[7:] -= 8.0  # few tokens, so that runs repeat
    return row.astype(np.float32)


Job = tuple[Sequence[int], SamplingParams]


def run(
    jobs: Sequence[Job],
    speculative: SpeculativeConfig | None,
    *,
    tokenizer: Tokenizer | None = None,
    is_poisoned: Any = lambda tokens: False,
    **config: Any,
) -> tuple[dict[str, RequestOutput], Driver, FakeExecutor]:
    """All jobs to their end."""
    resolved = dataclasses.replace(resolved_config(**config), speculative=speculative)
    executor = FakeExecutor(resolved, logits=pattern_logits, is_poisoned=is_poisoned)
    driver = Driver(resolved, executor, tokenizer)
    for prompt, params in jobs:
        driver.add(PromptInput(token_ids=tuple(prompt)), params)
    outputs: dict[str, RequestOutput] = {}
    while driver.has_work:
        outputs |= {output.request_id: output for output in driver.step()}
        driver.audit()
    assert driver.num_running == driver.num_waiting == 0
    return outputs, driver, executor


def answers(outputs: dict[str, RequestOutput]) -> dict[str, tuple[CompletionOutput, ...]]:
    return {request_id: output.outputs for request_id, output in outputs.items()}


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.6, "seed": 5, "ignore_eos": True},
    {"temperature": 1.0, "seed": 5, "n": 2, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "ignore_eos": True},
    {"temperature": 0.8, "presence_penalty": 0.5, "min_tokens": 6},
    {"temperature": 0.0, "stop_token_ids": [4], "min_tokens": 3},
    {"temperature": 0.0, "logit_bias": {7: 2.0, EOS: 1.0}, "prompt_logprobs": 1},
)
jobs_of = st.lists(
    st.tuples(
        st.lists(st.integers(2, 6), min_size=1, max_size=20),
        st.builds(
            lambda kind, count: SamplingParams(max_tokens=count, **kind),
            st.sampled_from(KINDS),
            st.integers(6, 18),
        ),
    ),
    min_size=1,
    max_size=5,
)


@given(jobs_of, st.integers(14, 40), st.sampled_from(LAYOUTS), st.integers(5, 32))
@settings(max_examples=25)
def test_answers_are_those_of_a_run_without_drafts(
    jobs: list[Job], num_blocks: int, sizes: tuple[int, int, int], rows: int
) -> None:
    """Under pressure too: requests are preempted, share prefixes, and compete for rows."""
    tp, pcp, dcp = sizes
    config: dict[str, Any] = {
        "num_blocks": num_blocks,
        "max_num_batched_tokens": rows,
        "parallel": ParallelConfig(
            tensor_parallel_size=tp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
        ),
    }
    plain, _, _ = run(jobs, None, **config)
    drafted, _, _ = run(jobs, DRAFTS, **config)
    assert answers(drafted) == answers(plain)
    for request_id, output in drafted.items():
        assert output.prompt_logprobs == plain[request_id].prompt_logprobs


def test_steps_are_saved_and_counted() -> None:
    jobs = [
        ([2, 3, 4, 5] * 4, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)),
        ([3, 3, 3], SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True)),
    ]
    plain, slow, _ = run(jobs, None)
    drafted, fast, executor = run(jobs, DRAFTS)
    assert answers(drafted) == answers(plain)
    slow_totals, totals = slow.counters.totals(), fast.counters.totals()
    assert (slow_totals["drafts"], slow_totals["accepted"]) == (0, 0)
    assert 0 < totals["accepted"] < totals["drafts"]
    assert totals["steps"] < slow_totals["steps"] == 40
    sent = sum(max(0, len(r.samples) - 1) for batch in executor.batches for r in batch.requests)
    assert totals["drafts"] == sent
    metrics = [output.metrics for output in drafted.values()]
    assert totals["drafts"] == sum(each.num_drafts for each in metrics)
    assert totals["accepted"] == sum(each.num_accepted_drafts for each in metrics)
    # Each accepted draft saves a request one step: rows of single decodes and one prompt's end.
    assert totals["rows"] == slow_totals["rows"] + totals["drafts"] - totals["accepted"]


def test_a_stop_string_in_the_middle_of_accepted_drafts_ends_the_answer() -> None:
    tokenizer = Tokenizer(byte_level(), special_tokens={}, chat_template=None)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole, _, _ = run([([2, 3, 4, 5] * 4, params)], None, tokenizer=tokenizer)
    text = whole["0"].outputs[0].text
    stops = sorted({text[at : at + size] for size in (2, 3, 5) for at in range(len(text) - 5)})
    assert len(stops) > 3
    for stop in stops:
        job = ([2, 3, 4, 5] * 4, dataclasses.replace(params, stop=(stop,)))
        plain, _, _ = run([job], None, tokenizer=tokenizer)
        drafted, _, _ = run([job], DRAFTS, tokenizer=tokenizer)
        assert plain["0"].outputs[0].stop_reason == stop
        assert answers(drafted) == answers(plain)


def test_bad_numbers_fail_a_request_where_a_plain_run_would_have_met_them() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompt = [2, 3, 4, 5] * 4
    whole = [*prompt, *run([(prompt, params)], None)[0]["0"].outputs[0].token_ids]
    num_deep = 0
    for length in range(len(prompt) + 1, len(prompt) + 24):
        bad = whole[:length]

        def is_poisoned(tokens: Sequence[int], bad: list[int] = bad) -> bool:
            return list(tokens) == bad

        plain, _, _ = run([(prompt, params)], None, is_poisoned=is_poisoned)
        drafted, _, executor = run([(prompt, params)], DRAFTS, is_poisoned=is_poisoned)
        assert plain["0"].error is not None
        assert drafted["0"].error is not None
        assert answers(drafted) == answers(plain)
        num_deep += length - 1 > executor.batches[-1].requests[0].num_computed_tokens
    assert num_deep > 5  # the bad row stood behind right drafts of its step


def test_bad_numbers_behind_a_wrong_draft_fail_nobody() -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    prompt = [2, 3, 4, 5] * 4
    (plain,) = run([(prompt, params)], None)[0].values()
    right = [*prompt, *plain.outputs[0].token_ids]
    num_poisoned = 0

    def is_poisoned(tokens: Sequence[int]) -> bool:
        nonlocal num_poisoned
        is_off = list(tokens) != right[: len(tokens)]
        num_poisoned += is_off
        return is_off

    drafted, _, _ = run([(prompt, params)], DRAFTS, is_poisoned=is_poisoned)
    assert num_poisoned > 5
    assert answers(drafted) == {"0": plain.outputs}


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_an_answer_never_outgrows_its_room(room: int) -> None:
    jobs = [([7] * 9, SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True))]
    outputs, _, executor = run(jobs, DRAFTS)
    assert len(outputs["0"].outputs[0].token_ids) == room
    assert all(
        request.num_computed_tokens + len(request.token_ids) <= 9 + room - 1
        for batch in executor.batches
        for request in batch.requests
    )


def test_aborted_requests_are_forgotten() -> None:
    resolved = dataclasses.replace(resolved_config(), speculative=DRAFTS)
    driver = Driver(resolved, FakeExecutor(resolved, logits=pattern_logits), None)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    first = driver.add(PromptInput(token_ids=(2, 3) * 4), params)
    driver.add(PromptInput(token_ids=(3, 4) * 4), params)
    for _ in range(3):
        driver.step()
    assert driver.num_running == 2
    driver.abort(first)
    while driver.has_work:
        driver.step()
    driver.audit()
    assert driver.counters.totals()["requests_abort"] == 1
