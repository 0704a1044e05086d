"""The recurrence as it is written down, one token after another.

It says what `chunked.scan_chunks` must equal, and for a single token it is the shortest way.

Legend: `B` runs, `T` tokens, `h` heads, `K` and `V` key and value width.

Source: gated delta, arXiv 2412.06464; Mamba-2, arXiv 2405.21060; lightning attention,
arXiv 2401.04658.
"""

from __future__ import annotations

import torch

from heddle.attention.recurrent.terms import Terms


def scan_tokens(terms: Terms, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run tokens from a state.

    Args:
        terms: `[B, T, h, ...]` in the dtype of the state.
        state: `[B, h, K, V]`; not modified.
    Returns:
        Readings `[B, T, h, V]`, and the state after the last token.
    """
    outs = []
    for t in range(terms.num_tokens):
        key, value = terms.key[:, t, :, :, None], terms.value[:, t, :, None]  # [B h K 1] [B h 1 V]
        state = state * terms.log_decay[:, t, :, None, None].exp()
        if terms.beta is not None:
            known = key.transpose(2, 3) @ state
            value = (value - known) * terms.beta[:, t, :, None, None]
        state = torch.addcmul(state, key, value)
        outs.append(terms.query[:, t, :, None] @ state)  # [B, h, 1, V]
    if not outs:
        return terms.value, state
    return torch.cat(outs, dim=2).transpose(1, 2), state
