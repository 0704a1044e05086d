"""Reads the rows of the head in batch order: prompt log-probabilities, then one drawn token per
request.
"""

from __future__ import annotations

import torch

from heddle.runner.logprobs import prompt_logprobs
from heddle.runner.sampler import Drawn, sample
from heddle.step.batch import GlobalBatch, SampledToken, SampleSpec, TokenLogprobs


def collect_samples(batch: GlobalBatch, logits: torch.Tensor) -> tuple[SampledToken, ...]:
    """What each request got from the step.

    Args:
        batch: the step's batch.
        logits: `[R, vocabulary]`; for each request its prompt-logprob rows, then its sampled row.
    """
    drawn = iter(_draw(batch, logits))
    found: list[SampledToken] = []
    row = 0
    for request in batch.requests:
        count = len(request.prompt_logprob_targets)
        prompt: tuple[TokenLogprobs, ...] = ()
        if count:
            prompt = prompt_logprobs(
                logits[row : row + count],
                request.prompt_logprob_targets,
                request.num_prompt_logprobs,
            )
        row += count
        if request.sample is None:
            if count:
                found.append(
                    SampledToken(
                        request_id=request.request_id, token_id=None, prompt_logprobs=prompt
                    )
                )
            continue
        token = next(drawn)
        row += 1
        found.append(
            SampledToken(
                request_id=request.request_id,
                token_id=token.token_id,
                logprobs=token.logprobs,
                prompt_logprobs=prompt,
                finite=token.finite,
                logits=token.logits,
            )
        )
    return tuple(found)


def _draw(batch: GlobalBatch, logits: torch.Tensor) -> list[Drawn]:
    """Draw for all sampled rows at once."""
    rows: list[int] = []
    specs: list[SampleSpec] = []
    row = 0
    for request in batch.requests:
        row += len(request.prompt_logprob_targets)
        if request.sample is not None:
            rows.append(row)
            specs.append(request.sample)
            row += 1
    if not rows:
        return []
    return sample(logits.index_select(0, torch.tensor(rows)), specs)
