"""One rank of the engine equals transformers, for prompts that take several chunks."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from heddle.config import SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from heddle.engine.tokenizer import load_tokenizer
from heddle.models.sources import resolve_model_path
from tests.flagship.conftest import GoldenModels
from tests.support.comparison import tolerance
from tests.support.demo_reference import reference_model
from tests.support.flagship import Case, logits_of, open_driver, resolve_case
from tests.support.tiny import VOCAB_SIZE, tiny_model

NUM_TOKENS = 6


def run_alone(driver: Driver, prompt: tuple[int, ...]) -> tuple[RequestOutput, int]:
    """The finished output of one prompt, and the number of steps it took."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    driver.add(PromptInput(token_ids=prompt), params, return_logits=True)
    outputs: list[RequestOutput] = []
    steps = 0
    while driver.has_work:
        outputs += driver.step()
        steps += 1
    return outputs[-1], steps


def check(
    model: torch.nn.Module,
    prompt: tuple[int, ...],
    output: RequestOutput,
    rounding: float = 0.0,
) -> None:
    """Logits of every generated position equal those of one pass over all tokens.

    `rounding` is what one rank itself is known to differ from float64, twice.
    """
    tokens = output.outputs[0].token_ids
    with torch.inference_mode():
        # The last token is never computed; a rotation may depend on the length of all that are.
        whole = model(torch.tensor([prompt + tokens[:-1]])).logits[0]
    expected = whole[len(prompt) - 1 :]
    found = logits_of(output, "float32")
    assert found.shape == expected.shape == (NUM_TOKENS, whole.shape[-1])
    assert float((found - expected).abs().max()) <= max(tolerance(expected), rounding)


@pytest.mark.parametrize(
    "name",
    [
        "llama-9-3",
        "qwen2",
        "qwen3",
        "mistral",
        "deepseek-v2",
        "deepseek-v2-lora",
        "deepseek-v3",
        "deepseek-v32",
        "mistral-window",
        "granite",
        "smollm3",
        "phi3",
        "llama-dynamic",
        "olmo2",
        "olmo3",
        "exaone4",
        "glm4",
        "gemma2",
        "gemma3",
        "gpt-oss",
        "llama4",
        "mixtral",
        "qwen3-moe",
        "qwen3-next",
        "bamba",
        "minimax",
        "glm4-moe",
        "olmoe",
        "minimax-m2",
        "glm4-moe-lite",
        "glm5",
    ],
)
def test_a_tiny_model_in_chunks(models: GoldenModels, name: str) -> None:
    path = models.path(name)
    prompt = tuple((i * i * 7 + 5) % (VOCAB_SIZE - 3) + 3 for i in range(61))
    with open_driver(resolve_case(path, Case(executor="inline", chunk=16))) as driver:
        output, steps = run_alone(driver, prompt)
    assert steps == 4 + NUM_TOKENS - 1
    model = tiny_model(name, seed=int(path.name.rsplit("-", 1)[1]))
    check(model, prompt, output, models.rounding(name))


def test_the_demo_model_in_chunks() -> None:
    path = Path(resolve_model_path("demo"))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer is not None
    text = files("heddle.verify").joinpath("text.txt").read_text()
    prompt = tuple(tokenizer.encode(text))[:530]
    with open_driver(resolve_case(path, Case(executor="inline", block_size=16))) as driver:
        output, steps = run_alone(driver, prompt)
    assert steps == 2 + NUM_TOKENS - 1
    check(reference_model(path), prompt, output)
