"""Everything that changes logits before temperature, in the one documented order.

    allowed ids -> bad words -> min_tokens mask -> logit_bias -> grammar mask
        -> repetition, frequency, presence

A mask sets -inf; penalties and biases leave -inf as it is. Rows are changed in place: the caller
owns the copy.

`min_tokens` gives way to a grammar that leaves nothing but the ids that end an answer.
"""

from __future__ import annotations

import numpy as np
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
        or bool(spec.grammar_mask)
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
    permitted = _permitted(row, spec)
    if spec.position < spec.params.min_tokens:
        ending_ids = [*spec.eos_token_ids, *spec.params.stop_token_ids]
        if permitted is None or _leaves_any(permitted & (row > -torch.inf), ending_ids):
            _mask(row, ending_ids)
    bias = spec.params.logit_bias
    if bias:
        index = torch.tensor(list(bias), dtype=torch.int64, device=row.device)
        row[index] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)
    if permitted is not None:
        row.masked_fill_(~permitted, -torch.inf)
    if spec.params.has_penalties:
        _penalise(row, spec)


def _permitted(row: torch.Tensor, spec: SampleSpec) -> torch.Tensor | None:
    """`[vocabulary]`, bool: ids that the grammar permits; None without one."""
    if not spec.grammar_mask:
        return None
    packed = np.frombuffer(spec.grammar_mask, np.uint8)
    bits = np.unpackbits(packed, count=row.shape[-1], bitorder="little")
    return torch.from_numpy(bits.view(np.bool_)).to(row.device)


def _leaves_any(drawable: torch.Tensor, masked_ids: list[int]) -> bool:
    drawable[masked_ids] = False
    return bool(drawable.any())


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
