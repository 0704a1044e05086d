"""A deterministic engine gives equal bits, run after run and for any number of threads."""

from __future__ import annotations

from pathlib import Path

from heddle.config.sampling import SamplingParams
from heddle.engine.llm import LLM
from tests.support.tiny import build_tiny


def answers(path: Path, num_threads: int) -> list[list[float]]:
    """Log-probabilities of two answers, to the last bit."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3)
    prompts = [[3 + i % 90 for i in range(150)], [5, 6]]
    with LLM(str(path), deterministic=True, num_threads=num_threads) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [entry.logprob for place in output.outputs[0].logprobs or () for entry in place.values()]
        for output in outputs
    ]


def test_bits_are_equal_run_after_run_and_over_threads(tmp_path: Path) -> None:
    path = build_tiny(tmp_path, "llama-9-3")
    first = answers(path, 1)
    assert all(len(answer) >= 12 for answer in first)
    for num_threads in (1, 2, 3):
        assert answers(path, num_threads) == first
