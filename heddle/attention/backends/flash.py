"""torch's CPU flash kernel, which also returns the log-sum-exp.

Facts that this file relies on, each with a test: the lse is natural; a stride of 0 over the heads
of a group is honoured, so kv heads are never repeated in memory; `is_causal` aligns at the top
left; float64 is computed in float64; a NaN that a row sees reaches its output. The kernel divides by
the number of rows, so it must never meet 0 of them, and it writes lse 0 for a fully masked row, so
masks are not used.

Legend: `R` rows, `Kg` kv heads, `G` query lanes of each, `L` keys, `D` head width.
"""

from __future__ import annotations

import torch

from heddle.attention.state import AttentionState, merge

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

SPLIT_KEYS = 2048
"""Few rows over at least so many keys are cut along the keys, to give every thread a share."""
SPLIT_MAX_ROWS = 8
SPLIT_PARTS = 4


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> AttentionState:
    """Attention of all rows over all keys, or over a causal square.

    Args:
        query: `[R, Kg, G, D]`, R >= 1, float32 or float64.
        key: `[L, Kg, D]`, L >= 1.
        value: `[L, Kg, D]`.
        scale: of the scores.
        is_causal: row i sees keys [0, i + 1).

    Returns:
        lse `[R, Kg, G]`.
    """
    few_rows = query.shape[0] <= SPLIT_MAX_ROWS
    if few_rows and not is_causal and key.shape[0] >= SPLIT_KEYS:
        return _flash_split(query, key, value, scale)
    lanes = query.shape[2]
    out, lse = _kernel(
        query.permute(1, 2, 0, 3),  # [Kg, G, R, D]
        key.transpose(0, 1).unsqueeze(1).expand(-1, lanes, -1, -1),  # [Kg, G, L, D], stride 0
        value.transpose(0, 1).unsqueeze(1).expand(-1, lanes, -1, -1),
        is_causal=is_causal,
        scale=scale,
    )
    return AttentionState(out.permute(2, 0, 1, 3), lse.permute(2, 0, 1))


def _flash_split(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> AttentionState:
    """Equal parts of the keys side by side, then the remainder, then one merge."""
    rows, heads, lanes, width = query.shape
    part = key.shape[0] // SPLIT_PARTS
    cut = part * SPLIT_PARTS
    folded = query.transpose(0, 1).reshape(1, heads, rows * lanes, width)
    out, lse = _kernel(
        folded.expand(SPLIT_PARTS, -1, -1, -1),  # [parts, Kg, R * G, D]
        key[:cut].unflatten(0, (SPLIT_PARTS, part)).transpose(1, 2),  # [parts, Kg, part, D]
        value[:cut].unflatten(0, (SPLIT_PARTS, part)).transpose(1, 2),
        scale=scale,
    )
    state = AttentionState(out, lse)
    if cut < key.shape[0]:
        tail = _kernel(
            folded, key[None, cut:].transpose(1, 2), value[None, cut:].transpose(1, 2), scale=scale
        )
        state = AttentionState(torch.cat([out, tail[0]]), torch.cat([lse, tail[1]]))
    whole = merge(state, strict=False)
    return AttentionState(
        whole.out.view(heads, rows, lanes, width).transpose(0, 1),
        whole.lse.view(heads, rows, lanes).transpose(0, 1),
    )
