"""How well the demo model predicts an English text does not depend on the layout."""

from __future__ import annotations

from functools import cache

import pytest

from heddle import LLM
from heddle.verify.prompts import shipped_text
from heddle.verify.task_runs import text_perplexity
from heddle.verify.tasks import (
    PERPLEXITY_TOKENS,
    WIDE_DIFFERENCE,
    perplexity_prompt,
    relative_difference,
)

CHUNK = 192
WINDOW = 1024


@cache
def perplexity(tp: int, pcp: int, dcp: int, stages: int = 1) -> float:
    is_alone = (tp, pcp, stages) == (1, 1, 1)
    with LLM(
        "demo",
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        pipeline_parallel_size=stages,
        executor="inline" if is_alone else "threads",
        max_num_batched_tokens=CHUNK,
        max_model_len=WINDOW,
        kv_cache_memory_bytes=1 << 27,
    ) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        prompt = perplexity_prompt(tokenizer.encode(shipped_text()), max_model_len=WINDOW)
        assert len(prompt) == PERPLEXITY_TOKENS == 512
        found = text_perplexity(llm, prompt)
        assert max(record.num_rows for record in llm.step_trace()) <= CHUNK
    return found


def check(*layout: int) -> None:
    assert WIDE_DIFFERENCE == 1e-5
    assert relative_difference(perplexity(*layout), perplexity(1, 1, 1)) <= WIDE_DIFFERENCE


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
