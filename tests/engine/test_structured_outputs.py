"""Answers of a given form, from the driver's point of view; a toy model draws."""

from __future__ import annotations

import dataclasses
import json
import re
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
from heddle.errors import RequestError
from tests.support.byte_tokenizer import printable
from tests.support.fake_executor import EOS, FakeExecutor, resolved_config, toy_logits
from tests.support.grammars import ids_of

TOKENIZER = Tokenizer(printable(), special_tokens={}, chat_template=None)
VOCAB_SIZE = 131
DATE = r"[12][0-9]{3}-[01][0-9]-[0-3][0-9]"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": [1, 2]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def form(max_tokens: int = 60, **fields: Any) -> SamplingParams:
    kinds = {"json", "regex", "choice", "grammar", "json_object"}
    described = {name: fields.pop(name) for name in kinds & set(fields)}
    given = {"temperature": 0.0, "max_tokens": max_tokens, **fields}
    return SamplingParams(structured_outputs=described or None, **given)


def start(**config: Any) -> tuple[Driver, FakeExecutor]:
    poisoned = config.pop("is_poisoned", lambda tokens: False)
    logits = config.pop("logits", None)
    resolved = resolved_config(vocab_size=VOCAB_SIZE, **config)
    executor = FakeExecutor(resolved, is_poisoned=poisoned, logits=logits)
    return Driver(resolved, executor, TOKENIZER), executor


def run(
    requests: Sequence[tuple[Sequence[int], SamplingParams]], **config: Any
) -> list[RequestOutput]:
    driver, _ = start(**config)
    names = [driver.add(PromptInput(token_ids=tuple(ids)), params) for ids, params in requests]
    outputs = drain(driver)
    return [outputs[name] for name in names]


def drain(driver: Driver) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while driver.has_work:
        for output in driver.step():
            last[output.request_id] = output
        driver.audit()
    return last


def answer(params: SamplingParams, prompt: Sequence[int] = (5, 6, 7), **config: Any) -> Any:
    (output,) = run([(prompt, params)], **config)
    assert output.error is None
    return output.outputs[0]


def favour_end(tokens: Sequence[int]) -> np.ndarray:
    """The toy model, which wants to end wherever it may."""
    row = toy_logits(tokens, VOCAB_SIZE)
    row[EOS] += 50.0
    return row


def repeating(tokens: Sequence[int]) -> np.ndarray:
    """Ids near the last but one are likely."""
    return -np.abs(np.arange(VOCAB_SIZE, dtype=np.float32) - tokens[-2:][0])


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def test_an_answer_is_the_likeliest_of_its_form_token_by_token() -> None:
    found = answer(form(choice=["yes", "no", "nobody"]))
    tokens, texts = [5, 6, 7], ["yes", "no", "nobody"]
    expected: list[int] = []
    while "".join(map(TOKENIZER.decode, [[t] for t in expected])) not in ("yes", "nobody"):
        text = TOKENIZER.decode(expected)
        legal = {encoded(x[len(text)])[0] for x in texts if x.startswith(text) and x != text}
        legal |= {EOS} if text in texts else set()
        row = toy_logits(tokens + expected, VOCAB_SIZE)
        expected.append(max(legal, key=lambda id_: row[id_]))
        if expected[-1] == EOS:
            break
    assert list(found.token_ids) == expected
    assert (found.finish_reason, found.stop_reason) == ("stop", None)


@settings(max_examples=25)
@given(st.lists(st.integers(2, 90), min_size=1, max_size=12), st.integers(0, 2**31))
def test_a_drawn_answer_has_its_form_whatever_the_other_parameters(
    prompt: list[int], seed: int
) -> None:
    params = form(
        120,
        regex=DATE,
        temperature=1.5,
        seed=seed,
        top_p=0.9,
        frequency_penalty=1.0,
        repetition_penalty=1.3,
        logit_bias={30: 50, 40: -50},
    )
    found = answer(params, prompt)
    assert re.fullmatch(DATE, found.text)
    assert found.finish_reason == "stop"


def test_an_answer_is_the_same_beside_others_and_under_pressure() -> None:
    plain = form(12, ignore_eos=True)
    params = [form(26, regex=DATE), plain, form(26, json=POINT)]
    jobs = [(range(2, 12 + number), wanted) for number, wanted in enumerate(params)]
    alone = [run([job])[0].outputs for job in jobs]
    assert [output.outputs for output in run(jobs)] == alone
    pressed = run(jobs, num_blocks=11, max_num_batched_tokens=16)
    assert [output.outputs for output in pressed] == alone
    assert sum(output.metrics.num_preemptions for output in pressed) > 0


LAYOUTS = {
    "TP 2 DCP 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "PCP 2 DCP 2": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two replicas": {"data_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_stages_and_replicas_do_not_matter(layout: str) -> None:
    jobs = [([3, n], form(regex=DATE) if n % 2 else form(json=POINT)) for n in range(5)]
    found = run(jobs, parallel=ParallelConfig(**LAYOUTS[layout]))
    assert [output.outputs for output in found] == [output.outputs for output in run(jobs)]


def test_each_choice_follows_the_grammar_by_itself() -> None:
    (output,) = run([([5, 6], form(json=POINT, n=4, temperature=1.0, seed=3))])
    assert len({found.text for found in output.outputs}) > 1
    for found in output.outputs:
        assert found.finish_reason == "stop"
        assert set(json.loads(found.text)) == {"x", "y"}


def test_masks_travel_only_with_rows_that_draw_under_a_grammar() -> None:
    driver, executor = start(max_num_batched_tokens=8)
    driver.add(PromptInput(token_ids=tuple(range(2, 32))), form(regex="[ab]{3}"))
    driver.add(PromptInput(token_ids=(3, 4)), form(6, ignore_eos=True))
    drain(driver)
    masks = {0: [], 1: []}  # type: dict[int, list[bytes]]
    for batch in executor.batches:
        for request in batch.requests:
            masks[request.request_id] += [spec.grammar_mask for spec in request.samples]
    legal = [TOKENIZER.decode([id_]) for id_ in ids_of(masks[0][0])]
    assert legal == ["a", "b"]
    assert len(masks[0]) == 3
    assert {len(mask) for mask in masks[0]} == {20}
    assert set(masks[1]) == {b""}


def test_text_that_can_go_on_ends_with_the_end_token() -> None:
    found = answer(form(regex="[ab]{4}c*"), logits=favour_end)
    assert re.fullmatch("[ab]{4}", found.text)
    assert found.token_ids[-1] == EOS
    assert (found.finish_reason, found.stop_reason) == ("stop", None)


def test_text_that_can_grow_no_further_ends_at_its_last_token() -> None:
    found = answer(form(regex="[ab]{4}"))
    assert len(found.token_ids) == 4
    assert (found.finish_reason, found.stop_reason) == ("stop", None)
    exact = answer(form(4, regex="[ab]{4}"))
    assert (exact.text, exact.finish_reason) == (found.text, "stop")
    short = answer(form(3, regex="[ab]{4}"))
    assert (short.text, short.finish_reason) == (found.text[:3], "length")


def test_an_ignored_end_token_is_not_drawn_and_the_answer_ends_with_its_form() -> None:
    found = answer(form(regex="[ab]{4}(cd)?", ignore_eos=True), logits=favour_end)
    assert re.fullmatch("[ab]{4}cd", found.text)
    assert EOS not in found.token_ids
    assert found.finish_reason == "stop"
    endless = answer(form(30, regex="[ab]*", ignore_eos=True), logits=favour_end)
    assert (len(endless.token_ids), endless.finish_reason) == (30, "length")


def test_min_tokens_holds_as_long_as_the_grammar_can_go_on() -> None:
    long = answer(form(regex="a+", min_tokens=7), logits=favour_end)
    assert (long.text, long.token_ids[-1]) == ("a" * 7, EOS)
    short = answer(form(regex="a{1,3}", min_tokens=7), logits=favour_end)
    assert (short.text, short.finish_reason) == ("aaa", "stop")


def test_a_stop_id_that_is_the_only_way_on_is_drawn_before_min_tokens() -> None:
    (letter,) = encoded("b")
    found = answer(form(regex="aab", min_tokens=7, stop_token_ids=[letter]))
    assert (found.text, found.finish_reason, found.stop_reason) == ("aab", "stop", None)
    stopped = answer(form(regex="aabcc", stop_token_ids=[letter]))
    assert (stopped.text, stopped.stop_reason) == ("aa", letter)


def test_stop_strings_cut_and_what_they_withhold_is_told_at_the_end() -> None:
    cut = answer(form(regex="abcd", stop="bc"))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("a", "stop", "bc")
    whole = answer(form(regex="abcd", stop="dx"))
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("abcd", "stop", None)


def test_a_stream_of_deltas_is_the_whole_answer() -> None:
    whole = answer(form(json=POINT))
    driver, _ = start()
    driver.add(PromptInput(token_ids=(5, 6, 7)), form(json=POINT, output_kind="delta"))
    pieces: list[CompletionOutput] = []
    while driver.has_work:
        pieces += [output.outputs[0] for output in driver.step()]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces[-2:]] == [None, "stop"]


def test_logprobs_are_those_of_the_model_without_the_grammar() -> None:
    found = answer(form(regex="[ab]{3}", logprobs=1))
    row = toy_logits([5, 6, 7], VOCAB_SIZE).astype(np.float64)
    expected = row[found.token_ids[0]] - np.log(np.exp(row).sum())
    first = found.logprobs[0]
    assert first[found.token_ids[0]].logprob == pytest.approx(expected, abs=1e-6)
    assert int(row.argmax()) in first


def test_drafts_are_made_for_the_others_only() -> None:
    drafts = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1)
    jobs = [([4, 5] * 6, form(regex="(ab)+")), ([4, 5] * 6, form(20, ignore_eos=True))]
    formed, plain = run(jobs, speculative=drafts, logits=repeating)
    assert formed.metrics.num_drafts == 0
    assert plain.metrics.num_accepted_drafts > 0
    assert [formed.outputs, plain.outputs] == [o.outputs for o in run(jobs, logits=repeating)]


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        (
            {"grammar": 'start: "b" NONE\nNONE: A & ~A\nA: "a"'},
            "invalid_grammar",
            "in the form that was asked for",
        ),
        ({"regex": "ab", "allowed_token_ids": [50]}, "invalid_value", "no permitted token"),
    ],
    ids=["the grammar", "another mask"],
)
def test_an_answer_without_a_next_token_fails_alone(
    fields: dict[str, Any], code: str, reason: str
) -> None:
    driver, _ = start()
    lost = driver.add(PromptInput(token_ids=(5, 6)), form(**fields))
    kept = driver.add(PromptInput(token_ids=(5, 6)), form(regex=DATE))
    outputs = drain(driver)
    error = outputs[lost].error
    assert error is not None
    assert error.code == code
    assert reason in str(error)
    assert re.fullmatch(DATE, outputs[kept].outputs[0].text)


def test_bad_numbers_are_still_called_bad_numbers() -> None:
    (output,) = run([([5, 6], form(regex=DATE))], is_poisoned=lambda tokens: len(tokens) == 4)
    assert "no usable numbers" in str(output.error)


def test_what_cannot_be_followed_is_refused_before_it_is_inside() -> None:
    driver, _ = start()
    with pytest.raises(RequestError, match="look-around") as caught:
        driver.add(PromptInput(token_ids=(5, 6)), form(regex="a(?=b)"))
    assert caught.value.code == "invalid_grammar"
    assert not driver.has_work
    with pytest.raises(RequestError, match="no text in the tokens of this model"):
        driver.add(PromptInput(token_ids=(5, 6)), form(regex="\u20ac"))


def test_a_model_without_tokenizer_has_no_forms() -> None:
    resolved = resolved_config(vocab_size=VOCAB_SIZE)
    driver = Driver(resolved, FakeExecutor(resolved), None)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        driver.add(PromptInput(token_ids=(5, 6)), form(regex="a"))


def test_a_model_without_end_token_ends_with_the_form() -> None:
    resolved = resolved_config(vocab_size=VOCAB_SIZE)
    model = dataclasses.replace(resolved.model, eos_token_ids=())
    resolved = dataclasses.replace(resolved, model=model)
    driver = Driver(resolved, FakeExecutor(resolved), TOKENIZER)
    driver.add(PromptInput(token_ids=(5, 6)), form(json=POINT))
    (output,) = drain(driver).values()
    assert set(json.loads(output.outputs[0].text)) == {"x", "y"}
    assert output.outputs[0].finish_reason == "stop"


def test_nothing_is_kept_of_a_request_that_was_aborted() -> None:
    driver, _ = start()
    name = driver.add(PromptInput(token_ids=(5, 6)), form(regex="a+", n=1))
    driver.step()
    driver.step()
    driver.abort(name)
    assert not driver.has_work
    follow_up = driver.add(PromptInput(token_ids=(5, 6)), form(regex="b{3}"))
    assert drain(driver)[follow_up].outputs[0].text == "bbb"
