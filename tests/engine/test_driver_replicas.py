"""Replicas and pipelines in the driver: the same tokens, whoever computes them and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config import ParallelConfig, SamplingParams
from heddle.config.model import MoEConfig
from heddle.config.speculative import SpeculativeConfig
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.tokenizer import Tokenizer
from tests.engine.test_driver import continue_without_eos, drain, greedy, ids
from tests.support.byte_tokenizer import byte_level
from tests.support.fake_executor import VOCAB_SIZE, FakeExecutor, resolved_config

MOE = MoEConfig(
    num_experts=4,
    num_experts_per_token=2,
    num_shared_experts=0,
    expert_intermediate_size=8,
    scoring="softmax",
    normalize_top_k=True,
)


def create(
    dp: int = 1, pp: int = 1, *, tokenizer: Tokenizer | None = None, **config: Any
) -> tuple[Driver, FakeExecutor]:
    has_experts = config.get("moe") is not None
    options: dict[str, Any] = {key: config.pop(key) for key in ("logits",) if key in config}
    parallel = ParallelConfig(
        data_parallel_size=dp, pipeline_parallel_size=pp, enable_expert_parallel=has_experts
    )
    resolved = resolved_config(parallel=parallel, **config)
    executor = FakeExecutor(resolved, **options)
    return Driver(resolved, executor, tokenizer), executor


def loads(driver: Driver) -> list[int]:
    return [replica.load for replica in driver.replicas]


def num_open_tokens(driver: Driver) -> int:
    return sum(
        sequence.num_tokens
        for state in driver._states.values()
        for sequence, answer in zip(state.sequences, state.answers, strict=True)
        if answer.finish_reason is None
    )


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(2, 9), min_size=1, max_size=25), st.integers(1, 9)),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([(1, 2), (1, 3), (2, 1), (3, 1), (2, 2)]),
    st.integers(12, 40),
    st.booleans(),
)
def test_replicas_stages_and_pressure_change_nothing(
    requests: list[tuple[list[int], int]],
    sizes: tuple[int, int],
    num_blocks: int,
    in_lockstep: bool,
) -> None:
    moe = MOE if in_lockstep else None
    driver, _ = create(*sizes, num_blocks=num_blocks, max_num_batched_tokens=16, moe=moe)
    for prompt, count in requests:
        driver.add(ids(*prompt), greedy(count))
    outputs = {}
    while driver.has_work:
        outputs.update({output.request_id: output for output in driver.step()})
        driver.audit()
        assert sum(loads(driver)) == num_open_tokens(driver)
    for index, (prompt, count) in enumerate(requests):
        expected = continue_without_eos(prompt, count)
        assert list(outputs[str(index)].outputs[0].token_ids) == expected
    assert driver.num_running == driver.num_waiting == 0
    assert not any(replica.num_under_way for replica in driver.replicas)


def test_all_choices_of_a_request_live_in_the_replica_with_least_load() -> None:
    driver, executor = create(dp=3)
    driver.add(ids(*range(2, 12)), greedy(4))
    driver.add(ids(5, 6, 7), SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
    driver.add(ids(9), greedy(4))
    driver.add(ids(8, 8), greedy(4))
    assert loads(driver) == [10, 9, 3]
    drain(driver)
    assert loads(driver) == [0, 0, 0]
    served = {
        replica: {request.request_id for request in batch.requests}
        for round_ in executor.rounds
        for replica, (batch, _) in round_.items()
    }
    first = {
        replica: {request.request_id for request in batch.requests}
        for replica, (batch, _) in executor.rounds[0].items()
    }
    assert first == {0: {0}, 1: {1, 2, 3}, 2: {4, 5}}
    assert all(served[replica] <= first[replica] for replica in first)


def test_a_prompt_goes_where_its_prefix_is_unless_that_replica_is_far_busier() -> None:
    driver, _ = create(dp=2)
    prompt = tuple(range(2, 34))
    driver.add(ids(40, 41), greedy(2))
    driver.add(ids(*prompt), greedy(2))
    drain(driver)  # replica 1 holds the prompt's prefix
    driver.add(ids(*range(10, 20)), greedy(2))
    assert loads(driver) == [10, 0]
    near = driver.add(ids(*prompt, 50), greedy(2))
    assert loads(driver) == [10, 33]
    still_near = driver.add(ids(*prompt, 51), greedy(2))  # 23 more load there, 32 tokens to gain
    assert loads(driver) == [10, 66]
    far = driver.add(ids(*prompt, 52), greedy(2))  # 56 more
    assert loads(driver) == [43, 66]
    outputs = drain(driver)
    hits = [outputs[request].num_cached_tokens for request in (near, still_near, far)]
    assert hits == [32, 32, 0]


def test_a_slow_replica_holds_up_no_other() -> None:
    driver, executor = create(dp=2)
    executor.slow = 0
    driver.add(ids(5, 6), greedy(3))
    driver.add(ids(7, 8), greedy(5))
    drain(driver)
    assert [replica for replica, _ in executor.collected] == [1] * 5 + [0] * 3


def test_in_lockstep_every_round_has_a_step_of_every_replica() -> None:
    driver, executor = create(dp=3, moe=MOE)
    driver.add(ids(5, 6), greedy(3))
    driver.add(ids(7, 8), greedy(5))
    outputs = drain(driver)
    assert list(outputs["1"].outputs[0].token_ids) == continue_without_eos([7, 8], 5)
    assert [sorted(round_) for round_ in executor.rounds] == [[0, 1, 2]] * 5
    sizes = [
        [len(round_[replica][0].requests) for replica in range(3)] for round_ in executor.rounds
    ]
    assert sizes == [[1, 1, 0]] * 3 + [[0, 1, 0]] * 2
    steps = [{batch.step for batch, _ in round_.values()} for round_ in executor.rounds]
    assert steps == [{number} for number in range(5)]
    assert len(executor.collected) == 15


def test_in_lockstep_no_replica_runs_ahead_by_more_than_the_pipeline() -> None:
    driver, executor = create(dp=2, pp=2, moe=MOE)
    executor.slow = 1
    for first in range(2, 8):
        driver.add(ids(first, 9), greedy(4))
    drain(driver)
    ahead = 0
    for replica, _ in executor.collected:
        ahead += 1 if replica == 0 else -1
        assert 0 <= ahead <= 2
    assert executor.most_under_way == 2


def test_without_experts_idle_replicas_run_nothing() -> None:
    driver, executor = create(dp=3)
    driver.add(ids(5, 6), greedy(3))
    drain(driver)
    assert [list(round_) for round_ in executor.rounds] == [[0]] * 3


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_as_many_steps_are_under_way_as_there_are_stages(pp: int) -> None:
    driver, executor = create(pp=pp)
    for first in range(2, 8):
        driver.add(ids(first, 9), greedy(4))
    outputs = drain(driver)
    assert executor.most_under_way == pp
    for index in range(6):
        expected = continue_without_eos([2 + index, 9], 4)
        assert list(outputs[str(index)].outputs[0].token_ids) == expected
    for (_, earlier), (_, later) in zip(executor.collected, executor.collected[1:], strict=False):
        assert earlier < later


def test_a_request_is_in_one_step_at_a_time() -> None:
    driver, executor = create(pp=3)
    driver.add(ids(3, 4), greedy(5))
    drain(driver)
    assert executor.most_under_way == 1


def test_an_aborted_request_under_way_leaves_nothing() -> None:
    driver, executor = create(dp=2, pp=2)
    for first in range(2, 10):
        driver.add(ids(first, 9, 9, 9), greedy(8))
    for _ in range(4):
        driver.step()
    for request_id in list(driver._states):
        assert driver.abort(request_id) is not None
    assert not driver.has_work
    assert loads(driver) == [0, 0]
    driver.audit()
    later = driver.add(ids(3, 4), greedy(3))
    outputs = drain(driver)
    assert list(outputs[later].outputs[0].token_ids) == continue_without_eos([3, 4], 3)
    assert not any(replica.num_under_way for replica in driver.replicas)
    assert driver.num_running == 0
    assert len(executor.collected) == len(executor.batches)


def test_bad_numbers_in_one_replica_end_one_request() -> None:
    resolved = resolved_config(
        parallel=ParallelConfig(data_parallel_size=2, pipeline_parallel_size=2)
    )
    executor = FakeExecutor(resolved, is_poisoned=lambda t: t[0] == 13 and len(t) > 5)
    driver = Driver(resolved, executor, None)
    for first in range(12, 16):
        driver.add(ids(first, 3, 4), greedy(6))
    outputs = drain(driver)
    assert outputs["1"].error is not None
    assert len(outputs["1"].outputs[0].token_ids) == 3
    for index in (0, 2, 3):
        expected = continue_without_eos([12 + index, 3, 4], 6)
        assert list(outputs[str(index)].outputs[0].token_ids) == expected


# Several tokens of one request in one step.


def cycle(tokens: list[int]) -> np.ndarray:
    """Logits that put one token first: the last but three, now and then another one."""
    row = np.zeros(VOCAB_SIZE, dtype=np.float32)
    follows = tokens[-4] if len(tokens) >= 4 else tokens[-1] + 1
    row[(follows + (len(tokens) % 11 == 0)) % VOCAB_SIZE] = 5.0
    return row


DRAFTS = SpeculativeConfig(num_speculative_tokens=3)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_drafts_change_only_the_number_of_steps(sizes: tuple[int, int]) -> None:
    def run(speculative: SpeculativeConfig | None) -> tuple[Any, dict[str, int]]:
        driver, _ = create(*sizes, logits=cycle, speculative=speculative)
        driver.add(ids(20, 21, 22, 23, 20, 21), greedy(40))
        driver.add(ids(30, 31, 32), greedy(25, stop_token_ids=[33]))
        driver.add(ids(40, 41, 42, 43), SamplingParams(seed=5, max_tokens=30, ignore_eos=True))
        outputs = drain(driver)
        told = {
            request_id: (output.outputs[0].token_ids, output.outputs[0].finish_reason)
            for request_id, output in outputs.items()
        }
        return told, driver.counters.totals()

    plain, plain_totals = run(None)
    told, totals = run(DRAFTS)
    assert told == plain
    assert totals["steps"] < plain_totals["steps"]
    assert 0 < totals["accepted"] < totals["drafts"]
    assert plain_totals["drafts"] == 0


def test_a_stop_string_in_the_middle_of_accepted_drafts_drops_the_rest() -> None:
    tokenizer = Tokenizer(byte_level(), special_tokens={}, chat_template=None)

    def run(speculative: SpeculativeConfig | None) -> Any:
        driver, _ = create(tokenizer=tokenizer, logits=cycle, speculative=speculative)
        prompt = PromptInput(token_ids=(20, 21, 22, 23) * 3)
        words = tokenizer.decode([22, 23, 20, 21, 22])
        driver.add(prompt, greedy(30, stop=[words], output_kind="delta"))
        told = []
        while driver.has_work:
            told += driver.step()
            driver.audit()
        assert loads(driver) == [0]
        answers = [output.outputs[0] for output in told]
        tokens = [token for answer in answers for token in answer.token_ids]
        text = "".join(answer.text for answer in answers)
        return tokens, text, answers[-1].finish_reason, answers[-1].stop_reason, len(told)

    *plain, num_plain = run(None)
    *drafted, num_drafted = run(DRAFTS)
    assert plain[2] == "stop"
    assert drafted == plain
    assert num_drafted < num_plain
