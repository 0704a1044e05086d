"""What a merge of attention states means, in plain torch.

    m = max(s_x)    a_x = exp(s_x - m)    z = sum a_x
    out = sum a_x * out_x / z             lse = m + log z

A state that saw no key is selected away and never multiplied away: its payload may hold anything.
The same bits as `heddle.attention.state.merge`, for plain tensors and without raising.

Legend: `X` states, `R` rows, `h` lanes, `Dv` value width.
"""

from __future__ import annotations

import math
from functools import reduce

import torch


def merge(
    outs: torch.Tensor, lses: torch.Tensor, visible: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states over disjoint key sets.

    Args:
        outs: `[X, R, h, Dv]`, float32 or float64.
        lses: `[X, R, h]`, natural, of the same type.
        visible: bool, broadcastable to `lses`: which states saw a key. None: those whose lse is not
            -inf.

    Returns:
        out `[R, h, Dv]` and lse `[R, h]`: exactly 0 and -inf where nothing was seen, NaN where a
        state that saw keys has an lse of NaN or infinity.
    """
    weights, lse, seen = _weights(lses, visible)
    terms = torch.where(seen.unsqueeze(-1), weights.unsqueeze(-1) * outs, 0.0)
    return reduce(torch.add, terms.unbind(0)), lse


def weigh(
    out: torch.Tensor, lses: torch.Tensor, visible: torch.Tensor | None, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One state's term of the merge.

    Args:
        out: `[R, h, Dv]`, of state `index`.
        lses: `[X, R, h]`, of all states.
        visible: see `merge`.
        index: of the state.

    Returns:
        `[R, h, Dv]`, terms which add up over the states to the output of `merge`; and its lse.
    """
    weights, lse, seen = _weights(lses, visible)
    return torch.where(seen[index].unsqueeze(-1), weights[index].unsqueeze(-1) * out, 0.0), lse


def _weights(
    lses: torch.Tensor, visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights `[X, R, h]`, the merged lse `[R, h]`, and which states saw a key `[X, R, h]`."""
    seen = lses != -math.inf if visible is None else visible.expand_as(lses)
    scores = torch.where(seen, lses.masked_fill(~lses.isfinite(), math.nan), -math.inf)
    peak = scores.amax(dim=0).clamp(min=torch.finfo(lses.dtype).min)
    parts = torch.exp(scores - peak)
    total = reduce(torch.add, parts.unbind(0))
    return parts / total.clamp(min=1.0), peak + torch.log(total), seen
