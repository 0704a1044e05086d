from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config import ParallelConfig, SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import PlanMismatch, PromptTooLong, RankFailed, RequestError
from tests.support.byte_tokenizer import byte_level
from tests.support.fake_executor import (
    EOS,
    VOCAB_SIZE,
    FakeExecutor,
    resolved_config,
    toy_greedy,
    toy_logits,
)


def greedy(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def ids(*tokens: int) -> PromptInput:
    return PromptInput(token_ids=tokens)


def create(executor: FakeExecutor | None = None, **config: Any) -> tuple[Driver, FakeExecutor]:
    resolved = resolved_config(**config)
    executor = executor or FakeExecutor(resolved)
    return Driver(resolved, executor, None), executor


def drain(driver: Driver) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while driver.has_work:
        for output in driver.step():
            last[output.request_id] = output
        driver.audit()
    return last


def continue_without_eos(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, VOCAB_SIZE).argmax()))
    return tokens[len(prompt) :]


LAYOUTS = [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_greedy_tokens_are_those_of_the_model_alone(layout: tuple[int, int, int]) -> None:
    tp, pcp, dcp = layout
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
    )
    driver, _ = create(parallel=parallel)
    prompts = [range(2, 42), [5], [7, 7, 7, 7, 7], range(10, 60)]
    for prompt in prompts:
        driver.add(ids(*prompt), greedy(6))
    outputs = drain(driver)
    assert len(outputs) == 4
    for index, prompt in enumerate(prompts):
        answer = outputs[str(index)].outputs[0]
        assert list(answer.token_ids) == continue_without_eos(list(prompt), 6)
        assert answer.finish_reason == "length"


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(2, 9), min_size=1, max_size=30), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    ),
    st.integers(14, 40),
)
def test_pressure_and_shared_prefixes_change_nothing(
    requests: list[tuple[list[int], int]], num_blocks: int
) -> None:
    driver, _ = create(num_blocks=num_blocks, max_num_batched_tokens=16)
    for prompt, count in requests:
        driver.add(ids(*prompt), greedy(count))
    outputs = drain(driver)
    for index, (prompt, count) in enumerate(requests):
        expected = continue_without_eos(prompt, count)
        assert list(outputs[str(index)].outputs[0].token_ids) == expected
    assert driver.num_running == driver.num_waiting == 0


def test_end_of_text_token_ends_an_answer() -> None:
    prompt = next(
        [2, start] for start in range(2, 60) if EOS in continue_without_eos([2, start], 30)
    )
    driver, _ = create()
    driver.add(ids(*prompt), SamplingParams(temperature=0.0, max_tokens=40))
    (output,) = drain(driver).values()
    answer = output.outputs[0]
    assert list(answer.token_ids) == toy_greedy(prompt, 40)
    assert answer.token_ids[-1] == EOS
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_end_token_of_the_tokenizer_ends_an_answer_too() -> None:
    resolved = resolved_config()
    expected = continue_without_eos([3, 4], 10)
    end = expected[4]
    assert end not in expected[:4]
    inner = byte_level()
    tokenizer = Tokenizer(
        inner, special_tokens={"eos_token": inner.id_to_token(end)}, chat_template=None
    )
    driver = Driver(resolved, FakeExecutor(resolved), tokenizer)
    driver.add(ids(3, 4), SamplingParams(temperature=0.0, max_tokens=10))
    (output,) = drain(driver).values()
    assert list(output.outputs[0].token_ids) == expected[:5]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_stop_id_ends_an_answer_and_is_named() -> None:
    expected = continue_without_eos([3, 4], 10)
    stop = expected[4]
    assert stop not in expected[:4]
    driver, _ = create()
    driver.add(ids(3, 4), greedy(10, stop_token_ids=[stop]))
    (output,) = drain(driver).values()
    assert list(output.outputs[0].token_ids) == expected[:5]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


def test_min_tokens_masks_stop_ids() -> None:
    first = continue_without_eos([3, 4], 1)[0]
    driver, _ = create()
    driver.add(ids(3, 4), greedy(6, stop_token_ids=[first], min_tokens=3))
    (output,) = drain(driver).values()
    answer = output.outputs[0]
    assert first not in answer.token_ids[:3]
    assert len(answer.token_ids) >= 3


SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)


def test_seeded_request_does_not_depend_on_neighbours_or_pressure() -> None:
    alone, _ = create()
    alone.add(ids(9, 8, 7), SEEDED)
    expected = drain(alone)["0"].outputs[0].token_ids
    assert len(set(expected)) > 4

    beside, _ = create(num_blocks=12, max_num_batched_tokens=8)
    neighbour = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    for position in range(3):
        if position == 1:
            beside.add(ids(9, 8, 7), SEEDED)
        beside.add(ids(*range(2 + position, 14 + position)), neighbour)
    outputs = drain(beside)
    assert beside.counters.totals()["preemptions"] > 0
    assert outputs["1"].outputs[0].token_ids == expected


def test_unseeded_run_repeats_with_the_engine_seed_and_ordinal() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def run(seed: int) -> list[tuple[int, ...]]:
        driver, _ = create(seed=seed)
        driver.add(ids(5, 6), params)
        driver.add(ids(5, 6), params)
        return [o.outputs[0].token_ids for o in drain(driver).values()]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(3)[0] != run(3)[1]


def test_choices_differ_and_share_one_request() -> None:
    driver, _ = create()
    driver.add(ids(9, 8, 7), SamplingParams(n=3, seed=1, max_tokens=10, ignore_eos=True))
    (output,) = drain(driver).values()
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({answer.token_ids for answer in output.outputs}) == 3
    single, _ = create()
    single.add(ids(9, 8, 7), SamplingParams(seed=1, max_tokens=10, ignore_eos=True))
    assert drain(single)["0"].outputs[0].token_ids == output.outputs[0].token_ids


def log_softmax(tokens: Sequence[int]) -> np.ndarray:
    row = toy_logits(tokens, VOCAB_SIZE).astype(np.float64)
    return row - math.log(np.exp(row).sum())


@pytest.mark.parametrize("blocks", [65, 13], ids=["roomy", "tight"])
def test_prompt_logprobs_are_by_position_fresh_chunked_cached_and_preempted(blocks: int) -> None:
    prompt = list(range(2, 32))
    driver, _ = create(num_blocks=blocks, max_num_batched_tokens=8)
    driver.add(ids(*prompt), greedy(2))
    drain(driver)  # its prefix is cached now
    driver.add(ids(*prompt), greedy(8))
    request = driver.add(ids(*prompt), greedy(2, prompt_logprobs=2))
    output = drain(driver)[request]
    assert output.num_cached_tokens == 0
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == 30
    assert found[0] is None
    for position in range(1, 30):
        entry = found[position]
        assert entry is not None
        expected = log_softmax(prompt[:position])
        chosen = entry[prompt[position]]
        assert chosen.logprob == pytest.approx(expected[prompt[position]], abs=1e-5)
        assert {*expected.argsort()[-2:].tolist(), prompt[position]} == set(entry)
        assert chosen.rank == 1 + int((expected > expected[prompt[position]]).sum())


def test_logprobs_hold_the_chosen_token_first_and_sum_up() -> None:
    driver, _ = create()
    driver.add(ids(4, 5), SamplingParams(seed=2, max_tokens=5, logprobs=2, ignore_eos=True))
    answer = drain(driver)["0"].outputs[0]
    assert answer.logprobs is not None
    tokens, total = [4, 5], 0.0
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert len(entry) in (2, 3)
        total += log_softmax(tokens)[token]
        tokens.append(token)
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_prefix_hits_are_counted_and_do_not_change_tokens() -> None:
    prompt = list(range(2, 34))
    driver, _ = create()
    driver.add(ids(*prompt), greedy(3))
    assert drain(driver)["0"].num_cached_tokens == 0
    driver.add(ids(*prompt), greedy(3))
    second = drain(driver)["1"]
    assert 28 <= second.num_cached_tokens <= 31
    assert list(second.outputs[0].token_ids) == continue_without_eos(prompt, 3)
    totals = driver.counters.totals()
    assert totals["prefix_cache_hits"] == second.num_cached_tokens
    assert totals["prefix_cache_queries"] == 64
    driver.reset_prefix_cache()
    driver.add(ids(*prompt), greedy(3))
    assert drain(driver)["2"].num_cached_tokens == 0


def test_bad_numbers_end_one_request_and_its_blocks_are_wiped() -> None:
    resolved = resolved_config()
    executor = FakeExecutor(
        resolved, is_poisoned=lambda tokens: tokens[0] == 13 and len(tokens) > 6
    )
    driver, _ = create(executor)
    for first in (12, 13, 14):
        driver.add(ids(first, 3, 4, 5), greedy(8))
    outputs = drain(driver)
    error = outputs["1"].error
    assert error is not None
    assert error.code == "generation_failed"
    assert len(outputs["1"].outputs[0].token_ids) == 3
    assert outputs["1"].outputs[0].finish_reason == "error"
    for index, first in ((0, 12), (2, 14)):
        assert outputs[str(index)].error is None
        expected = continue_without_eos([first, 3, 4, 5], 8)
        assert list(outputs[str(index)].outputs[0].token_ids) == expected
    assert any(batch.wiped_blocks for batch in executor.batches)
    assert driver.counters.totals()["requests_error"] == 1
    driver.add(ids(13, 3), greedy(2))  # the engine goes on
    assert list(drain(driver)["3"].outputs[0].token_ids) == continue_without_eos([13, 3], 2)


def test_bad_prompt_row_fails_a_request_that_wants_prompt_logprobs() -> None:
    resolved = resolved_config()
    executor = FakeExecutor(resolved, is_poisoned=lambda tokens: len(tokens) == 3)
    driver, _ = create(executor)
    driver.add(ids(5, 6, 7, 8, 9), greedy(4, prompt_logprobs=1))
    driver.add(ids(5, 6, 7, 8, 9), greedy(4))
    outputs = drain(driver)
    assert outputs["0"].error is not None
    assert outputs["1"].error is None


def test_failure_of_one_choice_ends_its_request() -> None:
    resolved = resolved_config()
    executor = FakeExecutor(resolved, is_poisoned=lambda tokens: len(tokens) == 6)
    driver, _ = create(executor)
    driver.add(ids(2, 3, 4), SamplingParams(n=2, seed=0, max_tokens=9, ignore_eos=True))
    (output,) = drain(driver).values()
    assert output.finished
    assert output.error is not None
    assert {answer.finish_reason for answer in output.outputs} == {"error"}


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_abort_returns_every_block_and_leaves_others_alone(steps: int) -> None:
    driver, _ = create(max_num_batched_tokens=8)
    gone = driver.add(ids(*range(2, 34)), greedy(8))
    stays = driver.add(ids(40, 41), greedy(12))
    for _ in range(steps):
        driver.step()
    final = driver.abort(gone)
    assert final is not None
    assert final.finished
    assert final.outputs[0].finish_reason == "abort"
    assert driver.abort(gone) is None
    outputs = drain(driver)
    assert gone not in outputs
    assert list(outputs[stays].outputs[0].token_ids) == continue_without_eos([40, 41], 12)
    driver.audit()
    assert driver.num_running == driver.num_waiting == 0


def test_output_kinds_tell_the_same_story() -> None:
    def run(kind: str) -> list[RequestOutput]:
        driver, _ = create()
        driver.add(ids(6, 7), greedy(5, logprobs=0, output_kind=kind))
        told = []
        while driver.has_work:
            told.extend(driver.step())
        return told

    final = run("final_only")
    assert len(final) == 1
    whole = final[0].outputs[0].token_ids
    assert len(whole) == 5
    deltas = run("delta")
    assert [len(d.outputs[0].token_ids) for d in deltas] == [1] * 5
    assert sum((d.outputs[0].token_ids for d in deltas), ()) == whole
    assert all(len(d.outputs[0].logprobs or ()) == 1 for d in deltas)
    growing = run("cumulative")
    assert [g.outputs[0].token_ids for g in growing] == [whole[: i + 1] for i in range(5)]
    assert [g.finished for g in growing] == [False] * 4 + [True]


def test_teacher_decides_tokens_and_logits_come_back() -> None:
    driver, _ = create()
    driver.add(ids(6, 7), greedy(4), teacher=[20, 21, 22, 23], return_logits=True)
    answer = drain(driver)["0"].outputs[0]
    assert answer.token_ids == (20, 21, 22, 23)
    assert answer.logits is not None
    for count, row in enumerate(answer.logits):
        expected = toy_logits([6, 7, 20, 21, 22, 23][: 2 + count], VOCAB_SIZE)
        assert np.array_equal(np.frombuffer(row, dtype=np.float32), expected)
    assert len(answer.logits) == 4


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "message"),
    [
        (ids(), greedy(), RequestError, "empty"),
        (ids(3, VOCAB_SIZE), greedy(), RequestError, r"token id 64 outside 0\.\.63"),
        (ids(3, -1), greedy(), RequestError, r"token id -1 outside 0\.\.63"),
        (ids(*[2] * 256), greedy(), PromptTooLong, "maximum context length is 256 tokens"),
        (ids(3), greedy(stop_token_ids=[64]), RequestError, "stop_token_ids"),
        (ids(3), greedy(logit_bias={99: 1.0}), RequestError, "logit_bias"),
        (ids(3), greedy(stop=["x"]), RequestError, "tokenizer"),
        (ids(3), greedy(bad_words=["x"]), RequestError, "tokenizer"),
        (PromptInput(text="x"), greedy(), RequestError, "no tokenizer"),
        (
            ids(3),
            greedy(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1),
            RequestError,
            "leaves no token",
        ),
    ],
)
def test_refused_at_the_door_and_the_next_one_is_served(
    prompt: PromptInput, params: SamplingParams, kind: type[Exception], message: str
) -> None:
    driver, _ = create()
    with pytest.raises(kind, match=message):
        driver.add(prompt, params)
    assert not driver.has_work
    driver.add(ids(3, 4), greedy(2))
    (output,) = drain(driver).values()
    assert list(output.outputs[0].token_ids) == continue_without_eos([3, 4], 2)


def test_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    driver, _ = create(num_blocks=9)
    with pytest.raises(PromptTooLong, match=r"needs 70, usable 32, window 256"):
        driver.add(ids(*[2] * 70), greedy())


def test_max_tokens_is_cut_to_the_room() -> None:
    driver, _ = create(num_blocks=9)
    driver.add(ids(*range(2, 32)), greedy(None))
    (output,) = drain(driver).values()
    # 32 stored tokens at most: 30 of the prompt, and the last completion token is never stored.
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_logprobs", [None, 1])
def test_answer_without_any_token_ends_with_its_prompt(num_logprobs: int | None) -> None:
    params = greedy(prompt_logprobs=num_logprobs)
    object.__setattr__(params, "max_tokens", 0)  # refused for callers; a door with echo needs it
    driver, _ = create(max_num_batched_tokens=4)
    driver.add(ids(*range(2, 12)), params)
    last: list[RequestOutput] = []
    for _ in range(10):
        last += driver.step()
    assert not driver.has_work
    assert last[-1].finished
    assert (last[-1].outputs[0].token_ids, last[-1].outputs[0].finish_reason) == ((), "length")
    if num_logprobs is not None:
        assert last[-1].prompt_logprobs is not None
        assert len([entry for entry in last[-1].prompt_logprobs if entry]) == 9


def test_no_block_of_a_failed_request_is_found_again_whichever_choice_failed() -> None:
    prompt = list(range(2, 10))
    params = SamplingParams(n=2, seed=0, max_tokens=9, ignore_eos=True)
    healthy, _ = create()
    healthy.add(ids(*prompt), params)
    first, second = (answer.token_ids for answer in drain(healthy)["0"].outputs)
    poisoned = [*prompt, *first[:6]]
    assert poisoned != [*prompt, *second[:6]]
    executor = FakeExecutor(resolved_config(), is_poisoned=lambda tokens: tokens == poisoned)
    driver, _ = create(executor)
    driver.add(ids(*prompt), params)
    assert drain(driver)["0"].error is not None
    driver.add(ids(*prompt), greedy(1))  # writes good blocks of the same prompt
    drain(driver)
    driver.add(ids(*prompt, *second[:6]), greedy(1))
    assert drain(driver)["2"].num_cached_tokens == len(prompt)


def test_interrupted_step_is_named_by_what_comes_after() -> None:
    driver, executor = create()
    driver.add(ids(3, 4), greedy(5))
    executor.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    with pytest.raises(RankFailed, match="KeyboardInterrupt in the middle of a step; make a new"):
        driver.add(ids(3), greedy())


def test_failed_rank_ends_the_engine() -> None:
    driver, executor = create()
    driver.add(ids(3, 4), greedy(5))
    driver.step()
    executor.failure = RankFailed("rank 1 (tp 1) died in step 1")
    with pytest.raises(RankFailed, match="rank 1"):
        driver.step()
    for call in (driver.step, lambda: driver.add(ids(3), greedy())):
        with pytest.raises(RankFailed, match="the engine has failed: rank 1"):
            call()


def test_rows_stored_twice_stop_the_step() -> None:
    class Doubling(FakeExecutor):
        def collect(self, replica: int) -> Any:
            replies = super().collect(replica)
            return (replies[0], replies[0])

    parallel = ParallelConfig(prefill_context_parallel_size=2, decode_context_parallel_size=2)
    driver, _ = create(Doubling(resolved_config(parallel=parallel)), parallel=parallel)
    driver.add(ids(3, 4), greedy(5))
    with pytest.raises(PlanMismatch, match=r"ranks \[0, 1\] wrote KV"):
        driver.step()


def test_times_are_in_order() -> None:
    resolved = resolved_config()
    ticks = iter(range(100))
    driver = Driver(resolved, FakeExecutor(resolved), None, clock=lambda: float(next(ticks)))
    driver.add(ids(3, 4), greedy(3))
    metrics = drain(driver)["0"].metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time < metrics.first_token_time < metrics.finished_time


def test_every_token_is_counted() -> None:
    driver, executor = create()
    driver.add(ids(3, 4, 5), greedy(4))
    driver.add(ids(9, 9), greedy(2))
    drain(driver)
    totals = driver.counters.totals()
    assert totals["prompt_tokens"] == 5
    assert totals["generation_tokens"] == 6
    assert totals["steps"] == len(executor.batches) == 4
    # Every token but the last of each answer is computed once.
    assert totals["rows"] == 5 + 6 - 2
    assert totals["requests_length"] == 2


def test_an_end_token_outside_the_vocabulary_ends_nothing() -> None:
    resolved = resolved_config()
    ends = (resolved.model.vocab_size, 10**30)
    resolved = replace(resolved, model=replace(resolved.model, eos_token_ids=ends))
    driver = Driver(resolved, FakeExecutor(resolved), None)
    driver.add(ids(3, 4), SamplingParams(temperature=0.0, max_tokens=5, min_tokens=2))
    (output,) = drain(driver).values()
    assert len(output.outputs[0].token_ids) == 5
