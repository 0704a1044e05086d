"""Run prompts through an engine and keep the logits of every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.config import EngineConfig, RequestOutputKind, SamplingParams
from heddle.engine.inputs import PromptInput
from heddle.engine.llm import LLM
from heddle.engine.outputs import RequestOutput
from heddle.errors import NumericsError
from heddle.verify.oracles import Trace


def run_prompts(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    teachers: Sequence[Sequence[int]] | None = None,
) -> tuple[Trace, ...]:
    """Start an engine, ask it as `ask_prompts` does, and close it.

    Args:
        config: of the engine.
        prompts, num_tokens, teachers: as of `ask_prompts`.
    Raises:
        NumericsError: an answer failed.
    """
    with LLM.from_config(config) as llm:
        return ask_prompts(llm, prompts, num_tokens=num_tokens, teachers=teachers)


def ask_prompts(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    teachers: Sequence[Sequence[int]] | None = None,
) -> tuple[Trace, ...]:
    """Answer all prompts in one batch, greedily, each for exactly `num_tokens` tokens.

    Args:
        llm: idle.
        prompts: token ids.
        num_tokens: of each answer; the end of text does not end it.
        teachers: tokens to feed instead of the engine's own choices, by prompt.
    Raises:
        NumericsError: an answer failed.
    """
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=num_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    outputs: dict[str, RequestOutput] = {}
    driver = llm.driver
    order = [
        driver.add(
            PromptInput(token_ids=tuple(prompt)),
            params,
            teacher=() if teachers is None else teachers[index],
            return_logits=True,
        )
        for index, prompt in enumerate(prompts)
    ]
    while driver.has_work:
        outputs |= {output.request_id: output for output in driver.step()}
    dtype: torch.dtype = getattr(torch, llm.plan.dtype)
    return tuple(_trace(outputs[request_id], dtype) for request_id in order)


def _trace(output: RequestOutput, dtype: torch.dtype) -> Trace:
    if output.error is not None:
        raise NumericsError(f"prompt {output.request_id}: {output.error}") from output.error
    answer = output.outputs[0]
    rows = [torch.frombuffer(bytearray(row), dtype=dtype) for row in answer.logits or ()]
    return Trace(answer.token_ids, torch.stack(rows).double())
