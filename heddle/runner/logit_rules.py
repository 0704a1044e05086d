"""Everything that changes logits before temperature, in the one documented order.

    allowed ids -> bad words -> min_tokens mask -> logit_bias -> repetition, frequency, presence

A mask sets -inf; penalties and biases leave -inf as it is. Rows are changed in place: the caller
owns the copy.
"""

from __future__ import annotations

import torch

from heddle.step.batch import SampleSpec


def has_rules(spec: SampleSpec) -> bool:
    """True when `apply_rules` could change a row of this request."""
    params = spec.params
    return (
        params.allowed_token_ids is not None
        or bool(spec.bad_word_ids)
        or spec.position < params.min_tokens
        or bool(params.logit_bias)
        or params.has_penalties
    )


def apply_rules(row: torch.Tensor, spec: SampleSpec) -> None:
    """Change one row of logits in place.

    Args:
        row: `[vocabulary]`, float32 or float64.
        spec: of the request that the row belongs to.
    """
    _keep_allowed(row, spec)
    _mask(row, _completing_ids(spec))
    if spec.position < spec.params.min_tokens:
        _mask(row, [*spec.eos_token_ids, *spec.params.stop_token_ids])
    bias = spec.params.logit_bias
    if bias:
        index = torch.tensor(list(bias), dtype=torch.int64, device=row.device)
        row[index] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)
    if spec.params.has_penalties:
        _penalise(row, spec)


def _keep_allowed(row: torch.Tensor, spec: SampleSpec) -> None:
    allowed = spec.params.allowed_token_ids
    if allowed is None:
        return
    index = torch.tensor(allowed, dtype=torch.int64, device=row.device)
    kept = row[index].clone()
    row.fill_(-torch.inf)
    row[index] = kept


def _completing_ids(spec: SampleSpec) -> list[int]:
    """Last ids of the bad words of which the output already ends in all the others."""
    output = spec.output_token_ids
    return [
        word[-1]
        for word in spec.bad_word_ids
        if len(word) == 1 or (len(output) >= len(word) - 1 and output[1 - len(word) :] == word[:-1])
    ]


def _mask(row: torch.Tensor, token_ids: list[int]) -> None:
    if token_ids:
        row[torch.tensor(token_ids, dtype=torch.int64, device=row.device)] = -torch.inf


def _penalise(row: torch.Tensor, spec: SampleSpec) -> None:
    params = spec.params
    output = torch.tensor(spec.output_token_ids, dtype=torch.int64, device=row.device)
    prompt = torch.tensor(spec.prompt_token_ids, dtype=torch.int64, device=row.device)
    if params.repetition_penalty != 1.0:
        seen = torch.unique(torch.cat([prompt, output]))
        values = row[seen]
        factor = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    used, counts = torch.unique(output, return_counts=True)
    row[used] -= params.frequency_penalty * counts.to(row.dtype) + params.presence_penalty
