"""Attention by matrix products over blocks of keys, for any widths, dtypes and visible lengths.

Blocks merge one by one with the same merge as everything else, so memory is bounded by one block of
scores. Latent attention comes here: its value is narrower than its key, and aliases it.

Legend: `R` rows, `Kg` kv heads, `G` query lanes of each, `L` keys, `Lb` keys of a block, `Dq`, `Dv`
widths.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from heddle.attention.state import AttentionState, accumulation_dtype, concatenate, merge

MAX_SCORES = 1 << 22
"""Scores held at once: 16 MiB in float32."""
MIN_BLOCK_KEYS = 128


def blocked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: npt.NDArray[np.int64],
    scale: float,
) -> AttentionState:
    """Attention of each row over its first keys.

    Args:
        query: `[R, Kg, G, Dq]`.
        key: `[L, Kg, Dq]`.
        value: `[L, Kg, Dv]`.
        visible: `[R]`, keys that each row sees; at least one row sees a key.
        scale: of the scores.

    Returns:
        lse `[R, Kg * G]`; nil for rows that see nothing.
    """
    dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
    scaled = query.to(dtype) * scale
    most = max(1, MAX_SCORES // (MIN_BLOCK_KEYS * query.shape[1] * query.shape[2]))
    return concatenate(
        [
            _blocked_rows(scaled[i : i + most], key, value, visible[i : i + most])
            for i in range(0, len(query), most)
        ]
    )


def _blocked_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: npt.NDArray[np.int64]
) -> AttentionState:
    """As `blocked`, for so few rows that `MIN_BLOCK_KEYS` keys stay within `MAX_SCORES`."""
    rows, heads, lanes, width = query.shape
    folded = query.transpose(0, 1).reshape(heads, rows * lanes, width)
    num_keys, seen_by_all = int(visible.max()), int(visible.min())
    bounds = torch.from_numpy(np.repeat(visible, lanes))[:, None]  # [R * G, 1]
    block = max(MIN_BLOCK_KEYS, MAX_SCORES // (heads * rows * lanes))
    state = AttentionState.nil((heads, rows * lanes, value.shape[-1]), dtype=query.dtype)
    for start in range(0, num_keys, block):
        end = min(start + block, num_keys)
        sees = None if end <= seen_by_all else torch.arange(start, end) < bounds
        part = _dense(folded, key[start:end], value[start:end], sees)
        state = part if start == 0 else merge([state, part], strict=False)
    return AttentionState(
        state.out.view(heads, rows, lanes, -1).transpose(0, 1).flatten(1, 2),
        state.lse.view(heads, rows, lanes).transpose(0, 1).flatten(1, 2),
    )


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor | None
) -> AttentionState:
    """One block.

    Args:
        query: `[Kg, R * G, Dq]`, scaled.
        key: `[Lb, Kg, Dq]`.
        value: `[Lb, Kg, Dv]`.
        sees: bool `[R * G, Lb]`; None: every row sees every key.

    Returns:
        lse `[Kg, R * G]`; -inf for rows that see nothing here.
    """
    key, value = key.to(query.dtype), value.to(query.dtype)
    scores = torch.bmm(query, key.permute(1, 2, 0))  # [Kg, R * G, Lb]
    if sees is not None:
        scores.masked_fill_(~sees, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # Not exp(scores - lse): with scores near 1e4 the rounding of the lse would show in the output.
    out = torch.bmm(torch.softmax(scores, dim=-1), value.transpose(0, 1))
    return AttentionState(out.masked_fill_((lse == -math.inf).unsqueeze(-1), 0.0), lse)
