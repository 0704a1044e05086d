"""Reads the rows of the head in batch order: prompt log-probabilities, then the drawn tokens of
each request.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from heddle.runner.acceptance import accept
from heddle.runner.logprobs import prompt_logprobs
from heddle.runner.sampler import Drawn, RowSampler
from heddle.step.batch import GlobalBatch, SampledToken, ScheduledRequest, TokenLogprobs


def collect_samples(batch: GlobalBatch, logits: torch.Tensor) -> tuple[SampledToken, ...]:
    """What each request got from the step.

    Args:
        batch: the step's batch.
        logits: `[R, vocabulary]`; for each request its prompt-logprob rows, then its sampled rows.
    Returns:
        In batch order. A request that samples has one entry, and one more per accepted draft, in
        order of position.
    """
    sampler = RowSampler(logits.index_select(0, _sampled_rows(batch)))
    found: list[SampledToken] = []
    row = num_sampled = 0
    for request in batch.requests:
        count = len(request.prompt_logprob_targets)
        prompt = prompt_logprobs(
            logits[row : row + count], request.prompt_logprob_targets, request.num_prompt_logprobs
        )
        drawn = _draw(request, sampler, num_sampled)
        found += _entries(request, prompt, drawn)
        row += count + len(request.samples)
        num_sampled += len(request.samples)
    return tuple(found)


def _sampled_rows(batch: GlobalBatch) -> torch.Tensor:
    """`[sampled rows]`: rows of the head that a token may be drawn from."""
    rows: list[int] = []
    row = 0
    for request in batch.requests:
        row += len(request.prompt_logprob_targets)
        rows += range(row, row + len(request.samples))
        row += len(request.samples)
    return torch.tensor(rows, dtype=torch.int64)


def _draw(request: ScheduledRequest, sampler: RowSampler, first_row: int) -> list[Drawn]:
    """The tokens of a request; none where it has rows of a prompt only."""
    if not request.samples:
        return []
    num_drafts = len(request.samples) - 1
    drafts = request.token_ids[len(request.token_ids) - num_drafts :]
    return accept(sampler, first_row, drafts, request.samples)


def _entries(
    request: ScheduledRequest, prompt: tuple[TokenLogprobs, ...], drawn: list[Drawn]
) -> Iterator[SampledToken]:
    if not drawn and request.prompt_logprob_targets:
        yield SampledToken(request_id=request.request_id, token_id=None, prompt_logprobs=prompt)
    for index, token in enumerate(drawn):
        yield SampledToken(
            request_id=request.request_id,
            token_id=token.token_id,
            logprobs=token.logprobs,
            prompt_logprobs=prompt if index == 0 else (),
            finite=token.finite,
            logits=token.logits,
            is_barred=token.is_barred,
        )
