"""Rotations that depend on a length: chosen once per request, from the longest that it may reach.

Every answer equals one pass of transformers over as many tokens; cached keys are met again only by
requests of the same rotation.
"""

from __future__ import annotations

import pytest
import torch

from heddle.config import SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from tests.flagship.conftest import GoldenModels
from tests.support.comparison import tolerance
from tests.support.flagship import Case, logits_of, open_driver, resolve_case
from tests.support.tiny import VOCAB_SIZE, tiny_model

WINDOW = 24
"""The original window of the tiny models."""


def ask(driver: Driver, prompt: tuple[int, ...], num_tokens: int) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    driver.add(PromptInput(token_ids=prompt), params, return_logits=True)
    output = None
    while driver.has_work:
        output = [*driver.step(), output][0]
    assert output is not None
    return output


def check(model: torch.nn.Module, prompt: tuple[int, ...], output: RequestOutput) -> None:
    tokens = output.outputs[0].token_ids
    with torch.inference_mode():
        whole = model(torch.tensor([prompt + tokens[:-1]])).logits[0]
    expected = whole[len(prompt) - 1 :]
    assert (logits_of(output, "float32") - expected).abs().max() <= tolerance(expected)


@pytest.mark.parametrize(
    ("name", "num_prompt", "answers"),
    [
        # (tokens of the answer, is the prompt met in the cache)
        ("llama-dynamic", 13, [(5, False), (9, True), (20, False), (20, True), (28, False)]),
        ("phi3", 13, [(5, False), (9, True), (20, False), (28, True), (6, True)]),
        ("llama-dynamic", 30, [(5, False), (6, False), (5, True)]),
    ],
)
def test_an_answer_equals_a_pass_of_its_length_and_shares_keys_with_its_likes(
    models: GoldenModels, name: str, num_prompt: int, answers: list[tuple[int, bool]]
) -> None:
    path = models.path(name)
    seed = int(path.name.rsplit("-", 1)[1])
    prompt = tuple((i * i * 7 + 5) % (VOCAB_SIZE - 3) + 3 for i in range(num_prompt))
    case = Case(executor="inline", chunk=8, has_prefix=True)
    with open_driver(resolve_case(path, case)) as driver:
        for num_tokens, is_cached in answers:
            output = ask(driver, prompt, num_tokens)
            check(tiny_model(name, seed), prompt, output)
            assert (output.num_cached_tokens > 0) == is_cached


@pytest.mark.parametrize(
    "case",
    [
        Case(sizes=(2, 2, 2), chunk=16, has_prefix=True, is_preempted=True),
        Case(sizes=(1, 3, 3), chunk=7, context="ring_kv"),
    ],
    ids=lambda case: case.name,
)
def test_rows_of_many_lengths_in_one_step_equal_one_rank(models: GoldenModels, case: Case) -> None:
    models.check("length", "llama-dynamic", case)
