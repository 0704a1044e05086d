"""A step without one finite row is noted; three in a row are trouble, one good row ends it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from heddle import LLM, SamplingParams
from heddle.engine.bad_numbers import STEPS_UNTIL_ALARM, BadNumbers
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from heddle.step.batch import SampledToken
from tests.support.tiny import build_tiny

GOOD = [SampledToken(request_id=1, token_id=5)]
BAD = [SampledToken(request_id=2, token_id=None, finite=False)]
BARRED = [SampledToken(request_id=3, token_id=None, finite=False, is_barred=True)]


def test_three_bad_steps_in_a_row_are_trouble(caplog: pytest.LogCaptureFixture) -> None:
    numbers = BadNumbers()
    with caplog.at_level(logging.WARNING):
        for _ in range(STEPS_UNTIL_ALARM):
            assert numbers.trouble == ""
            numbers.note({2: BAD}, {2}, (1,))
    assert numbers.trouble == "the last 3 steps came to NaN or inf in every row"
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING"] * 3 + ["ERROR"]
    assert "ranks that had them before the head: 1" in caplog.text


def test_a_request_that_permits_no_token_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    numbers = BadNumbers()
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * STEPS_UNTIL_ALARM):
            numbers.note({3: BARRED}, {3}, ())
    assert (numbers.trouble, numbers.num_in_a_row, caplog.text) == ("", 0, "")
    numbers.note({2: BAD, 3: BARRED}, {2, 3}, ())
    assert numbers.num_in_a_row == 0, "the other one's numbers are finite"


def test_one_good_row_proves_that_ranks_compute() -> None:
    numbers = BadNumbers()
    for _ in range(5):
        numbers.note({2: BAD, 1: GOOD}, {2}, ())
    assert numbers.trouble == ""
    for _ in range(2):
        numbers.note({2: BAD}, {2}, ())
    numbers.note({1: GOOD}, set(), ())
    numbers.note({2: BAD}, {2}, ())
    assert (numbers.trouble, numbers.num_in_a_row) == ("", 1)


def test_steps_that_draw_nothing_say_nothing() -> None:
    numbers = BadNumbers()
    for _ in range(STEPS_UNTIL_ALARM):
        numbers.note({2: BAD}, {2}, ())
        numbers.note({}, set(), ())
    assert numbers.trouble


LAYOUTS = [
    {},
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
]


def ask(driver: Driver, prompt: list[int], count: int = 6) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    return driver.add(PromptInput(token_ids=tuple(prompt)), params)


def finish(driver: Driver) -> dict[str, RequestOutput]:
    found = {}
    while driver.has_work:
        found |= {output.request_id: output for output in driver.step() if output.finished}
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nan_in_one_request_leaves_nothing_behind(tmp_path: Path, layout: dict[str, int]) -> None:
    """It fails, its neighbour goes on as if alone, and its blocks are scrubbed on every rank and
    found by nobody."""
    folder = build_tiny(tmp_path, "llama-8-2")
    victim, neighbour = [5 + i % 90 for i in range(21)], [7 + i % 50 for i in range(18)]
    settings = {"executor": "threads", "block_size": 4, "kernels": "torch", "num_threads": 1}
    with LLM(str(folder), num_gpu_blocks_override=40, **settings, **layout) as llm:
        driver = llm.driver
        alone = [ask(driver, prompt) for prompt in (victim, neighbour)]
        golden = finish(driver)
        llm.reset_prefix_cache()
        first, second = ask(driver, victim), ask(driver, neighbour)
        driver.step()
        block = driver._places[len(alone)].sequence.block_tables[0][0]
        workers = driver.executor.workers  # type: ignore[attr-defined]
        for worker in workers:
            for rows in worker.store.tensors:
                rows[4 * block : 4 * block + 4] = torch.nan
        found = finish(driver)
        assert found[first].outputs[0].finish_reason == "error"
        assert found[second].outputs[0].token_ids == golden[alone[1]].outputs[0].token_ids
        again = ask(driver, victim)
        outputs = finish(driver)
        assert outputs[again].num_cached_tokens == 0
        assert outputs[again].outputs[0].token_ids == golden[alone[0]].outputs[0].token_ids
        stored = [rows for worker in workers for rows in worker.store.tensors]
        assert len(stored) == 2 * len(workers)
        assert not any(rows[4 * block : 4 * block + 4].isnan().any() for rows in stored)
        assert driver.bad_numbers.trouble == ""
        driver.audit()


def test_an_engine_whose_rows_are_all_bad_is_in_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build_tiny(tmp_path, "llama-8-2")
    with LLM(str(folder), executor="threads", kernels="torch", tensor_parallel_size=2) as llm:
        worker = llm.driver.executor.workers[1]  # type: ignore[attr-defined]
        with torch.inference_mode():
            worker.model._layers[0].attention_norm.weight.fill_(torch.nan)
        for count in (1, 2, 3):
            ask(llm.driver, [5 + count, 6, 7])
            assert [o.outputs[0].finish_reason for o in finish(llm.driver).values()] == ["error"]
            assert llm.driver.bad_numbers.num_in_a_row == count
        assert llm.driver.bad_numbers.trouble.startswith("the last 3 steps came to NaN or inf")
    assert caplog.text.count("ranks that had them before the head: 0 1") == 3
