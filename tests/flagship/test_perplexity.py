"""How well the demo model predicts an English text does not depend on the layout."""

from __future__ import annotations

import math
from functools import cache

import pytest

from heddle import LLM, SamplingParams
from heddle.verify.prompts import shipped_text

NUM_TOKENS = 512
CHUNK = 192


@cache
def perplexity(tp: int, pcp: int, dcp: int, stages: int = 1) -> float:
    """exp of the mean negative log-probability of each token after the first."""
    is_alone = (tp, pcp, stages) == (1, 1, 1)
    with LLM(
        "demo",
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        pipeline_parallel_size=stages,
        executor="inline" if is_alone else "threads",
        max_num_batched_tokens=CHUNK,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 27,
    ) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        prompt = tokenizer.encode(shipped_text())[:NUM_TOKENS]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    found = [
        logprobs[token].logprob
        for token, logprobs in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        if logprobs is not None
    ]
    assert len(found) == NUM_TOKENS - 1
    return math.exp(-math.fsum(found) / len(found))


def check(*layout: int) -> None:
    assert math.isclose(perplexity(*layout), perplexity(1, 1, 1), rel_tol=1e-5)


def test_prose_surprises_the_model_little() -> None:
    assert 5 < perplexity(1, 1, 1) < 40


def test_perplexity_over_ranks_is_that_of_one() -> None:
    check(1, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [(3, 1, 1), (3, 2, 2), (3, 2, 6), (1, 4, 2), (1, 2, 2, 2)], ids=str
)
def test_perplexity_on_further_layouts(layout: tuple[int, ...]) -> None:
    check(*layout)
