"""A model that has learnt to look things up finds a key in 2,048 bytes, on one rank and over ranks.

Random weights show that layouts agree; a trained model shows that they agree on something. Its
weights come from `tools/train_passkey.py`, which never saw these keys and never saw prose.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from heddle import LLM
from heddle.models.config_json import load_model_config
from heddle.verify.prompts import shipped_text
from heddle.verify.task_runs import Answer, passkey_answers
from heddle.verify.tasks import FACT, NUM_DIGITS, QUESTION, Passkey, accuracy, draw_passkeys

FOLDER = Path(__file__).parents[1] / "data" / "passkey-mla"
LENGTH = 2048
CHUNK = 512
NUM_PROMPTS = 64


@cache
def passkeys() -> tuple[Passkey, ...]:
    return draw_passkeys(shipped_text(), length=LENGTH, count=NUM_PROMPTS)


def answers(asked: tuple[Passkey, ...], pcp: int, dcp: int) -> tuple[Answer, ...]:
    """What a layout says, prompt by prompt."""
    with LLM(
        str(FOLDER),
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        executor="inline" if pcp == 1 else "threads",
        max_num_batched_tokens=CHUNK,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 25,
    ) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        assert {len(tokenizer.encode(passkey.prompt)) for passkey in asked} == {LENGTH}
        found = passkey_answers(llm, asked)
        assert max(record.num_rows for record in llm.step_trace()) <= CHUNK
    return found


def test_the_task_is_what_it_says() -> None:
    model = load_model_config(FOLDER)
    assert model.mla is not None
    assert len({passkey.key for passkey in passkeys()}) == len(passkeys()) == NUM_PROMPTS
    depths = [passkey.prompt.index(FACT) for passkey in passkeys()]
    assert depths[0] == 0
    assert depths[-1] > LENGTH - 100
    for passkey in passkeys():
        assert len(passkey.prompt.encode()) == LENGTH
        assert passkey.prompt.count(passkey.key) == 1
        assert passkey.prompt.endswith(QUESTION)
        assert sum(character.isdigit() for character in passkey.prompt) == NUM_DIGITS


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(3, id="a third")]
)
def test_keys_are_found_on_one_rank_and_the_same_ones_over_ranks(every: int) -> None:
    asked = passkeys()[::every]
    alone, shared = answers(asked, 1, 1), answers(asked, 2, 2)
    assert shared == alone
    keys = [passkey.key for passkey in asked]
    assert accuracy([answer.text for answer in alone], keys) > 0.95
