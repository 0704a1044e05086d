"""Attention of rows that each have keys of their own, picked for them: sparse attention.

The keys of a row are gathered from the store beforehand, so every row meets a small dense problem.
One kv head serves all lanes (a latent).

Legend: `R` query rows, `Hq` lanes, `L` places for keys, `Dq`, `Dv` key and value width.
"""

from __future__ import annotations

import math

import torch

from heddle.attention.backends.base import IntArray, checked_visible
from heddle.attention.state import AttentionState, accumulation_dtype


def attend_selected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: IntArray, scale: float
) -> AttentionState:
    """Attention of each row over the first keys of its own.

    Args:
        query: `[R, Hq, Dq]`.
        key: `[R, L, Dq]`; places that do not count may hold anything.
        value: `[R, L, Dv]`; the same; may alias `key`.
        count: `[R]`; the first count[i] keys of row i count, in any order.
        scale: multiplies the scores before the softmax; part of the lse.

    Returns:
        out `[R, Hq, Dv]`, lse `[R, Hq]`; nil for rows without keys.

    Raises:
        ValueError: a count outside [0, L], or not one per row.
    """
    _, end = checked_visible(count, len(query), key.shape[1])
    most = int(end.max(initial=0))
    dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
    if most == 0:
        return AttentionState.nil(
            (*query.shape[:2], value.shape[-1]), dtype=dtype, device=query.device
        )
    counts = torch.from_numpy(end).to(query.device)[:, None]
    hidden = (torch.arange(most, device=query.device) >= counts)[:, None]  # [R, 1, L]
    scores = torch.bmm(query.to(dtype) * scale, key[:, :most].to(dtype).transpose(1, 2))
    scores.masked_fill_(hidden, -math.inf)  # [R, Hq, L]
    lse = torch.logsumexp(scores, dim=-1)
    # A share of 0 does not stop a NaN in a place that does not count.
    values = value[:, :most].to(dtype).masked_fill(hidden.transpose(1, 2), 0.0)
    out = torch.bmm(torch.softmax(scores, dim=-1), values)
    return AttentionState(out.masked_fill_((lse == -math.inf).unsqueeze(-1), 0.0), lse)
