"""Log-probabilities of the model's raw distribution, before any mask, penalty or temperature."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from heddle.kernels.sampling.reference import Floats, ordered_prefix
from heddle.step.batch import TokenLogprobs

_ROWS_AT_ONCE = 32


def token_logprobs(row: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities of one position.

    Args:
        row: `[vocabulary]` raw finite logits, float32 or float64.
        token_id: the chosen, or the prompt's, token.
        count: alternatives wanted, >= 0.
    Returns:
        The token's value and rank, and the `count` best in (value descending, id ascending) order.
        Where the token is one of them its two values are the same float.
    """
    return _from_logprobs(torch.log_softmax(row, dim=-1).cpu().numpy(), token_id, count)


def prompt_logprobs(
    logits: torch.Tensor, targets: Sequence[int], count: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of prompt tokens, a bounded number of rows at a time.

    Args:
        logits: `[R, vocabulary]`; row i predicts `targets[i]`.
        targets: the next prompt token of each row, R of them.
        count: alternatives per position, >= 0.
    Returns:
        One entry per row; none at all when a row holds NaN or inf, so that the request fails
        instead of reporting NaN.
    """
    if len(targets) != logits.shape[0]:
        raise ValueError(f"{len(targets)} targets for {logits.shape[0]} rows of logits")
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        rows = widen(logits[start : start + _ROWS_AT_ONCE])
        if not bool(finite_rows(rows).all()):
            return ()
        values = torch.log_softmax(rows, dim=-1).cpu().numpy()
        found.extend(
            _from_logprobs(row, token_id, count)
            for row, token_id in zip(values, targets[start:], strict=False)
        )
    return tuple(found)


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """`[R, vocabulary]` -> `[R]` bool: rows without NaN or inf; no large temporary."""
    low, high = torch.amin(logits, dim=-1), torch.amax(logits, dim=-1)  # both propagate NaN
    return torch.isfinite(low) & torch.isfinite(high)


def widen(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32, or float64 where they are float64 already."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _from_logprobs(values: Floats, token_id: int, count: int) -> TokenLogprobs:
    top = ordered_prefix(values, count)[:count]
    chosen = values[token_id]
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(chosen),
        rank=1 + int(np.count_nonzero(values > chosen)),
        top_token_ids=tuple(top.tolist()),
        top_logprobs=tuple(values[top].tolist()),
    )
