"""What a driver does, as numbers: held against what its requests got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config import ParallelConfig, SamplingParams, SpeculativeConfig
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.errors import PlanMismatch
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request
from heddle.server.engine_watch import EngineWatch, WatchedCounters, kind_of, max_over_mean
from tests.support.fake_executor import VOCAB_SIZE, FakeExecutor, resolved_config


class Cell:
    """A counter, a gauge and a histogram in one."""

    def __init__(self) -> None:
        self.value = 0.0
        self.seen: list[float] = []

    def inc(self, amount: float = 1) -> None:
        assert amount >= 0
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.seen.append(value)


class Recorded:
    """Keeps all numbers by name and labels."""

    def __init__(self) -> None:
        self.cells: dict[tuple[Any, ...], Cell] = {}

    def of(self, name: str, replica: int = 0, **labels: object) -> Cell:
        return self.cells.setdefault((name, replica, *labels.values()), Cell())

    def value(self, name: str, *labels: object, replica: int = 0) -> float:
        return self.cells[(name, replica, *labels)].value

    def seen(self, name: str, *labels: object, replica: int = 0) -> list[float]:
        return self.cells[(name, replica, *labels)].seen


class Clock:
    """A second passes at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def watched(
    model: dict[str, Any] | None = None, logits: Any = None, **config: Any
) -> tuple[Driver, Recorded, EngineWatch]:
    resolved = resolved_config(**config)
    resolved = replace(resolved, model=replace(resolved.model, **(model or {})))
    values, clock = Recorded(), Clock()
    watch = EngineWatch(values, clock=clock)
    driver = Driver(
        resolved, watch.around(FakeExecutor(resolved, logits=logits)), None, clock=clock
    )
    watch.listen(driver)
    return driver, values, watch


def greedy(max_tokens: int = 4, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def drain(driver: Driver, watch: EngineWatch) -> None:
    while driver.has_work:
        driver.step()
        watch.look(driver)


PROMPT = PromptInput(token_ids=tuple(range(2, 22)))


def test_tokens_are_counted_as_steps_end() -> None:
    driver, values, watch = watched()
    driver.add(PROMPT, greedy(4))
    driver.step()
    assert watch.totals.num_prompt_tokens == 20  # long before the request ends
    drain(driver, watch)
    assert values.value("generation_tokens") == watch.totals.num_generation_tokens == 4
    assert values.seen("iteration_tokens_total") == [20, 1, 1, 1]
    assert [len(values.seen("step_seconds", kind)) for kind in ("prefill", "decode", "mixed")] == [
        1,
        3,
        0,
    ]
    assert len(values.seen("inter_token_latency_seconds")) == 3
    assert values.value("request_success", "length") == 1
    assert driver.counters.totals()["generation_tokens"] == 4


def test_a_prefix_that_is_found_counts_as_found() -> None:
    driver, values, watch = watched()
    for _ in range(2):
        driver.add(PROMPT, greedy(1))
        drain(driver, watch)
    found = driver.counters.totals()["prefix_cache_hits"]
    assert found > 0
    assert values.value("prompt_tokens_cached") == values.value("prefix_cache_hits") == found
    assert values.value("prefix_cache_queries") == values.value("prompt_tokens") == 40
    assert values.value("prompt_tokens_by_source", "local_compute") == 40 - found
    assert values.seen("request_prefill_kv_computed_tokens") == [20, 20 - found]


def test_times_of_a_request_fit_together() -> None:
    driver, values, watch = watched()
    driver.add(PROMPT, greedy(5))
    drain(driver, watch)
    queue, inference, whole = (
        values.seen(f"request_{name}_time_seconds")[0]
        if name != "e2e"
        else values.seen("e2e_request_latency_seconds")[0]
        for name in ("queue", "inference", "e2e")
    )
    prefill, decode = (
        values.seen(f"request_{name}_time_seconds")[0] for name in ("prefill", "decode")
    )
    first = values.seen("time_to_first_token_seconds")[0]
    assert queue + inference == whole
    assert queue + prefill == first
    assert prefill + decode == inference
    assert min(queue, prefill, decode) > 0
    assert values.seen("request_time_per_output_token_seconds") == [decode / 4]


def test_gaps_lie_between_the_ends_of_steps_and_tokens_share_them() -> None:
    def runs(tokens: Sequence[int]) -> np.ndarray:  # 5 5 5 ...: every guess is right
        return np.eye(VOCAB_SIZE, dtype=np.float32)[5]

    speculative = SpeculativeConfig(
        num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2
    )
    driver, values, watch = watched(logits=runs, speculative=speculative)
    driver.add(PromptInput(token_ids=(5, 5, 5, 5)), greedy(10))
    ends = []
    while driver.has_work:
        driver.step()
        assert watch._executor is not None
        assert watch._executor.ended is not None
        ends.append(watch._executor.ended.end)
    assert values.value("generation_tokens") == 10
    assert values.value("spec_decode_num_accepted_tokens") > 5
    gaps = values.seen("inter_token_latency_seconds")
    assert len(ends) < len(gaps) == 9
    assert sum(gaps) == pytest.approx(ends[-1] - ends[0])
    assert min(gaps) < min(b - a for a, b in pairwise(ends))


def test_an_aborted_request_leaves_nothing_behind() -> None:
    driver, values, watch = watched(max_num_seqs=1)
    decoding, waiting = driver.add(PROMPT, greedy(50)), driver.add(PROMPT, greedy(50))
    for _ in range(3):
        driver.step()
    driver.abort(decoding)
    driver.abort(waiting)
    drain(driver, watch)
    assert values.value("requests_aborted", "decode") == 1
    assert values.value("requests_aborted", "waiting") == 1
    assert values.value("requests_aborted", "prefill") == 0
    assert values.value("request_success", "abort") == 2
    assert not watch._seen


def test_a_request_aborted_during_its_step_is_not_met_again() -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2)
    driver, _, watch = watched(parallel=parallel)
    aborted = driver.add(PROMPT, greedy(50))
    driver.add(PromptInput(token_ids=(5, 6, 7)), greedy(3))
    driver.step()
    driver.abort(aborted)
    drain(driver, watch)
    assert not watch._seen


def test_numbers_that_are_not_finite_are_told_from_other_ends() -> None:
    resolved = resolved_config()
    values = Recorded()
    watch = EngineWatch(values)
    executor = FakeExecutor(resolved, is_poisoned=lambda tokens: len(tokens) == 22)
    driver = Driver(resolved, watch.around(executor), None)
    watch.listen(driver)
    driver.add(PROMPT, greedy(10))
    drain(driver, watch)
    assert values.value("corrupted_requests") == 1
    assert values.value("request_success", "error") == 1
    assert not watch._seen


def test_preempted_prompts_count_once() -> None:
    driver, values, watch = watched(num_blocks=13)
    for first in (2, 30):
        driver.add(PromptInput(token_ids=tuple(range(first, first + 20))), greedy(12))
    drain(driver, watch)
    preemptions = driver.counters.totals()["preemptions"]
    assert preemptions > 0
    assert values.value("num_preemptions") == watch.totals.num_preemptions == preemptions
    assert values.value("prompt_tokens") == 40
    assert values.value("generation_tokens") == 24
    assert sum(values.seen("request_num_preemptions")) == preemptions


def test_ranks_of_a_replica_are_told_apart() -> None:
    parallel = ParallelConfig(
        prefill_context_parallel_size=2, decode_context_parallel_size=2, data_parallel_size=2
    )
    driver, values, watch = watched(parallel=parallel)
    assert [list(watch.ranks_of(replica)) for replica in (0, 1)] == [[0, 1], [2, 3]]
    for first in (2, 30):
        driver.add(PromptInput(token_ids=tuple(range(first, first + 20))), greedy(3))
    drain(driver, watch)
    watch.ranks.show()
    assert values.value("rank_step", 3, replica=1) >= 2
    assert values.value("generation_tokens", replica=1) == 3
    watch.note_ranks(up=False)
    assert values.value("rank_up", 2, replica=1) == 0


def test_prompt_rows_that_are_dealt_out_show_their_balance() -> None:
    wide = {"hidden_size": 4096, "intermediate_size": 16384}  # whose rows are worth dealing out
    parallel = ParallelConfig(prefill_context_parallel_size=2)
    driver, values, watch = watched(model=wide, parallel=parallel, max_num_batched_tokens=256)
    driver.add(PromptInput(token_ids=tuple(i % 60 for i in range(201))), greedy(2))
    drain(driver, watch)
    # Cut at 50, 100 and 150: rank 0 computes the first and the last piece.
    first, second = sum(range(1, 51)) + sum(range(151, 202)), sum(range(51, 151))
    assert values.value("pcp_load_ratio") == pytest.approx(2 * first / (first + second))
    assert values.value("pcp_padding_tokens") == 1  # 101 rows beside 100; decodes are copies


def test_kv_that_lies_unevenly_shows() -> None:
    parallel = ParallelConfig(
        prefill_context_parallel_size=2, decode_context_parallel_size=2, kv_interleave_size=4
    )
    driver, values, watch = watched(parallel=parallel)
    driver.add(PromptInput(token_ids=(2, 3, 4)), greedy(50))
    driver.step()
    watch.look(driver)
    assert values.value("kv_imbalance_ratio") == 2.0  # all tokens are on one of two ranks


def test_the_head_of_the_queue_says_why_it_waits() -> None:
    driver, values, watch = watched(max_num_seqs=1)
    for _ in range(3):
        driver.add(PROMPT, greedy(3))
    driver.step()
    watch.look(driver)
    state = watch.queue_state(driver)
    assert (state.num_running, state.num_waiting) == (1, 2)
    assert "waits for a seat" in state.why_waiting
    assert 0 < state.kv_usage < 1
    counted = sum(
        cell.value for key, cell in values.cells.items() if key[0].endswith("waiting_by_reason")
    )
    assert counted == 2
    drain(driver, watch)
    assert watch.queue_state(driver).why_waiting == ""


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 2)), max_size=6
    ),
    aborted=st.sets(st.integers(0, 5)),
    num_blocks=st.sampled_from([30, 65]),
    stages=st.sampled_from([1, 2]),
)
def test_sums_are_those_of_the_driver(
    lengths: list[tuple[int, int, int]], aborted: set[int], num_blocks: int, stages: int
) -> None:
    driver, values, watch = watched(
        num_blocks=num_blocks, parallel=ParallelConfig(pipeline_parallel_size=stages)
    )
    names = [
        driver.add(
            PromptInput(token_ids=tuple(range(2, 2 + size))),
            greedy(count, n=n, seed=1)
            if n == 1
            else SamplingParams(max_tokens=count, n=n, ignore_eos=True),
        )
        for size, count, n in lengths
    ]
    for _ in range(2):
        driver.step()
    for place in sorted(aborted):
        if place < len(names):
            driver.abort(names[place])
    drain(driver, watch)
    totals = driver.counters.totals()
    assert values.value("generation_tokens") == totals["generation_tokens"]
    assert values.value("num_preemptions") == totals["preemptions"]
    assert sum(values.seen("request_generation_tokens")) == totals["generation_tokens"]
    assert len(values.seen("request_prompt_tokens")) == len(lengths)
    assert not watch._seen


def test_counters_go_on_from_where_they_were() -> None:
    driver, _, watch = watched()
    driver.add(PROMPT, greedy(2))
    drain(driver, watch)
    before = driver.counters.totals()
    assert before["generation_tokens"] == 2
    assert WatchedCounters(driver.counters, watch).totals() == before


def test_a_step_is_named_by_its_parts() -> None:
    request = Request(request_id=0, prompt_token_ids=(1,) * 9, params=greedy(), max_output_tokens=4)
    decode = ScheduledPart(request, 9, 1, samples=True)
    drafts = ScheduledPart(request, 9, 3, samples=True, draft_token_ids=(1, 2))
    piece = ScheduledPart(request, 0, 8, samples=False)
    last = ScheduledPart(request, 0, 9, samples=True)
    assert kind_of(ScheduledBatch(parts=(decode, drafts))) == "decode"
    assert kind_of(ScheduledBatch(parts=(piece, last))) == "prefill"
    assert kind_of(ScheduledBatch(parts=(decode, piece))) == "mixed"


@pytest.mark.parametrize(("loads", "ratio"), [([0, 0], 1.0), ([4], 1.0), ([3, 1], 1.5)])
def test_balance_of_nothing_is_even(loads: list[int], ratio: float) -> None:
    assert max_over_mean(loads) == ratio


def test_a_step_that_ranks_disagree_about_is_counted_by_what_differed() -> None:
    driver, values, _ = watched()
    executor = driver._executor.inner  # type: ignore[attr-defined]
    executor.failure = PlanMismatch("rank 1 got step 2", "step")
    driver.add(PromptInput(token_ids=(5, 6)), SamplingParams(max_tokens=3, temperature=0.0))
    with pytest.raises(PlanMismatch):
        driver.step()
    assert values.value("step_mismatch", "step") == 1
    assert values.value("step_mismatch", "epoch") == 0
    assert driver.counters.totals()["mismatches_step"] == 1
