"""A model that has learnt to look things up finds a key in 2,048 bytes, on one rank and over ranks.

Random weights show that layouts agree; a trained model shows that they agree on something. Its
weights come from `tools/train_passkey.py`, which never saw these keys and never saw prose.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from heddle import LLM, SamplingParams
from heddle.models.config_json import load_model_config
from heddle.verify.prompts import shipped_text

FOLDER = Path(__file__).parents[1] / "data" / "passkey-mla"
LENGTH = 2048
CHUNK = 512
NUM_PROMPTS = 64
NUM_DIGITS = 5
FACT = "The pass key is "
QUESTION = "What is the pass key? The pass key is "


@cache
def draw_prompts() -> dict[str, str]:
    """Key by prompt; keys lie from the very start to right before the question. Digits differ, as
    in training: two layers match what stands after a byte, and cannot tell two equal ones apart.
    """
    rng = random.Random("depths and keys")
    prose = " ".join(shipped_text().split()) + " "
    prompts = {}
    for number in range(NUM_PROMPTS):
        key = "".join(rng.sample("0123456789", NUM_DIGITS))
        fact = f"{FACT}{key}. "
        room = LENGTH - len(fact) - len(QUESTION)
        start = rng.randrange(len(prose))
        filler = (prose + prose)[start : start + room - 1] + " "
        depth = filler.rfind(" ", 0, room * number // (NUM_PROMPTS - 1)) + 1
        prompts[filler[:depth] + fact + filler[depth:] + QUESTION] = key
    return prompts


def answers(pcp: int, dcp: int) -> list[str]:
    """What a layout says, prompt by prompt."""
    with LLM(
        str(FOLDER),
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        executor="inline" if pcp == 1 else "threads",
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=1 << 25,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_DIGITS, ignore_eos=True)
        outputs = llm.generate(list(draw_prompts()), params, use_tqdm=False)
        assert {len(output.prompt_token_ids) for output in outputs} == {LENGTH}
        assert max(record.num_rows for record in llm.step_trace()) <= CHUNK
    return [output.outputs[0].text for output in outputs]


def test_the_task_is_what_it_says() -> None:
    model = load_model_config(FOLDER)
    assert model.mla is not None
    prompts = draw_prompts()
    assert len(set(prompts.values())) == len(prompts) == NUM_PROMPTS
    depths = [prompt.index(FACT) for prompt in prompts]
    assert depths[0] == 0
    assert depths[-1] > LENGTH - 100
    for prompt, key in prompts.items():
        assert len(prompt.encode()) == LENGTH
        assert prompt.count(key) == 1
        assert prompt.endswith(QUESTION)
        assert sum(character.isdigit() for character in prompt) == NUM_DIGITS


def test_keys_are_found_on_one_rank_and_the_same_ones_over_ranks() -> None:
    alone, shared = answers(1, 1), answers(2, 2)
    assert shared == alone
    right = [found == key for found, key in zip(alone, draw_prompts().values(), strict=True)]
    assert sum(right) / len(right) > 0.95
