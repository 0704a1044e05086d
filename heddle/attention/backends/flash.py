"""torch's CPU flash kernel, which also returns the log-sum-exp.

Facts that this file relies on, each with a test: the lse is natural; a stride of 0 over the heads
of a group is honoured, so kv heads are never repeated in memory; `is_causal` aligns at the top
left; float64 is computed in float64. The kernel divides by the number of rows, so it must never
meet 0 of them. Where it believes that a row sees nothing it writes out 0 and lse 0, and it believes
so of a row whose few keys are all NaN: such a shard would pass as text. An lse of exactly 0 is
therefore never taken from it.

Legend: `R` rows, `Kg` kv heads, `G` query lanes of each, `L` keys, `D` head width.
"""

from __future__ import annotations

import torch

from heddle.attention.state import AttentionState, merge

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

SPLIT_KEYS = 8192
"""Few rows over at least so many keys are cut along the keys, to give every thread a share."""
SPLIT_MAX_ROWS = 8
SPLIT_PARTS = 4


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> AttentionState | None:
    """Attention of all rows over all keys, or over a causal square.

    Args:
        query: `[R, Kg, G, D]`, R >= 1, float32 or float64.
        key: `[L, Kg, D]`, L >= 1.
        value: `[L, Kg, D]`.
        scale: of the scores.
        is_causal: row i sees keys [0, i + 1).

    Returns:
        lse `[R, Kg * G]`; None where the answer of the kernel cannot be trusted.
    """
    if not is_causal and key.shape[0] >= SPLIT_KEYS and query.shape[0] <= SPLIT_MAX_ROWS:
        return _flash_split(query, key, value, scale)
    if query.shape[0] == 1:
        # Lanes of a group take the place of rows: views of the inputs are views for the kernel.
        out, lse = _kernel(query, _batched(key), _batched(value), scale=scale)
        return None if _is_doubtful(lse) else AttentionState(out.flatten(1, 2), lse.flatten(1, 2))
    if not is_causal:
        # Folded rows are many, and the kernel then walks the keys in larger tiles.
        out, lse = _kernel(_folded(query), _batched(key), _batched(value), scale=scale)
        return None if _is_doubtful(lse) else _unfolded(out[0], lse[0], query)
    out, lse = _kernel(
        query.permute(1, 2, 0, 3),  # [Kg, G, R, D]
        _repeated(key, query.shape[2]),
        _repeated(value, query.shape[2]),
        is_causal=True,
        scale=scale,
    )
    if _is_doubtful(lse):
        return None
    return AttentionState(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


def _is_doubtful(lse: torch.Tensor) -> bool:
    return not bool(lse.all())


def _batched(rows: torch.Tensor) -> torch.Tensor:
    """`[L, Kg, D]` as a view `[1, Kg, L, D]`."""
    return rows.transpose(0, 1).unsqueeze(0)


def _folded(query: torch.Tensor) -> torch.Tensor:
    """`[R, Kg, G, D]` as `[1, Kg, R * G, D]`: without a mask, lanes are just more rows."""
    _, heads, _, width = query.shape
    return query.transpose(0, 1).reshape(1, heads, -1, width)


def _unfolded(out: torch.Tensor, lse: torch.Tensor, query: torch.Tensor) -> AttentionState:
    """`[Kg, R * G, D]` back to rows and lanes, lse `[R, Kg * G]`."""
    rows, heads, lanes, width = query.shape
    return AttentionState(
        out.view(heads, rows, lanes, width).transpose(0, 1).flatten(1, 2),
        lse.view(heads, rows, lanes).transpose(0, 1).flatten(1, 2),
    )


def _repeated(rows: torch.Tensor, lanes: int) -> torch.Tensor:
    """`[L, Kg, D]` as a view `[Kg, G, L, D]`, with stride 0 over the lanes."""
    return rows.transpose(0, 1).unsqueeze(1).expand(-1, lanes, -1, -1)


def _flash_split(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> AttentionState | None:
    """Equal parts of the keys side by side, then the remainder, then one merge."""
    part = key.shape[0] // SPLIT_PARTS
    cut = part * SPLIT_PARTS
    cut_shape = (SPLIT_PARTS, part, *key.shape[1:])
    folded = _folded(query)
    out, lse = _kernel(
        folded.expand(SPLIT_PARTS, -1, -1, -1),  # [parts, Kg, R * G, D]
        key[:cut].view(cut_shape).transpose(1, 2),  # [parts, Kg, part, D]
        value[:cut].view(cut_shape).transpose(1, 2),
        scale=scale,
    )
    if cut < key.shape[0]:
        tail = _kernel(folded, _batched(key[cut:]), _batched(value[cut:]), scale=scale)
        out, lse = torch.cat([out, tail[0]]), torch.cat([lse, tail[1]])
    if _is_doubtful(lse):
        return None
    whole = merge(AttentionState(out, lse), strict=False)
    return _unfolded(whole.out, whole.lse, query)
