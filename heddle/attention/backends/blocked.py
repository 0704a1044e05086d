"""Attention by matrix products over blocks of keys, for any widths, dtypes and ranges of keys.

Rows whose ranges differ are cut into tiles, each of which meets only the keys that some row of it
sees. Blocks of keys merge one by one with the same merge as everything else, so memory is bounded
by one block of scores. Latent attention comes here: its value is narrower than its key, and aliases
it. So do sliding windows and soft caps.

Legend: `R` rows, `Kg` kv heads, `G` query lanes of each, `L` keys, `Lb` keys of a block, `Dq`, `Dv`
widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from heddle.attention.backends.base import IntArray
from heddle.attention.state import AttentionState, accumulation_dtype, concatenate, merge

MAX_SCORES = 1 << 22
"""Scores held at once: 16 MiB in float32."""
MIN_BLOCK_KEYS = 128
MIN_TILE_ROWS = 64
"""Fewer rows would make small products; more would meet more keys that they do not see."""


def blocked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: IntArray,
    end: IntArray,
    scale: float,
    softcap: float = 0.0,
) -> AttentionState:
    """Attention of each row over its range of keys.

    Args:
        query: `[R, Kg, G, Dq]`, R >= 1.
        key: `[L, Kg, Dq]`.
        value: `[L, Kg, Dv]`.
        first: `[R]`, first key that each row sees.
        end: `[R]`, one past the last; both 0 for a row that sees nothing.
        scale: of the scores.
        softcap: of the scaled scores; 0: none.

    Returns:
        lse `[R, Kg * G]`; nil for rows that see nothing.
    """
    dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
    scaled = query.to(dtype) * scale
    most = max(1, MAX_SCORES // (MIN_BLOCK_KEYS * query.shape[1] * query.shape[2]))
    tile = min(most, _tile_rows(first, end))
    return concatenate(
        [
            _attend_tile(scaled[rows], key, value, first[rows], end[rows], softcap)
            for rows in (slice(i, i + tile) for i in range(0, len(query), tile))
        ]
    )


def _tile_rows(first: IntArray, end: IntArray) -> int:
    """Rows of a tile: all where they see the same keys, else a share of the keys that one sees."""
    if len(end) <= MIN_TILE_ROWS or (np.ptp(first) == 0 and np.ptp(end) == 0):
        return len(end)
    return max(MIN_TILE_ROWS, int((end - first).max()) // 4)


def _attend_tile(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: IntArray,
    end: IntArray,
    softcap: float,
) -> AttentionState:
    """As `blocked`, of scaled queries so few that `MIN_BLOCK_KEYS` keys stay in `MAX_SCORES`."""
    rows, heads, lanes, width = query.shape
    folded = query.transpose(0, 1).reshape(heads, rows * lanes, width)
    bounds = [torch.from_numpy(np.repeat(bound, lanes))[:, None] for bound in (first, end)]
    inner = int(first.max()), int(end.min())  # keys that every row sees
    state: AttentionState | None = None
    for start, stop in _key_blocks(
        first, end, max(MIN_BLOCK_KEYS, MAX_SCORES // (heads * rows * lanes))
    ):
        sees = None
        if start < inner[0] or stop > inner[1]:
            places = torch.arange(start, stop)
            sees = (places >= bounds[0]) & (places < bounds[1])  # [R * G, Lb]
        part = _dense(folded, key[start:stop], value[start:stop], sees, softcap)
        state = part if state is None else merge([state, part], strict=False)
    if state is None:
        state = AttentionState.nil((heads, rows * lanes, value.shape[-1]), dtype=query.dtype)
    return AttentionState(
        state.out.view(heads, rows, lanes, -1).transpose(0, 1).flatten(1, 2),
        state.lse.view(heads, rows, lanes).transpose(0, 1).flatten(1, 2),
    )


def _key_blocks(first: IntArray, end: IntArray, most: int) -> Iterator[tuple[int, int]]:
    """Blocks of at most `most` keys that cover exactly the keys which some row sees."""
    for start, stop in _spans(first, end):
        for place in range(start, stop, most):
            yield place, min(place + most, stop)


def _spans(first: IntArray, end: IntArray) -> list[tuple[int, int]]:
    """The union of ranges, as ascending ranges with holes between them.

    A hole may hold NaN, which a mask keeps out of scores but not out of the sum of values.
    """
    sees = first < end
    if not sees.any():
        return []
    first, end = first[sees], end[sees]
    if first.max() <= end.min():  # all meet: the usual case
        return [(int(first.min()), int(end.max()))]
    order = np.argsort(first)
    starts, reach = first[order], np.maximum.accumulate(end[order])
    cuts = np.flatnonzero(starts[1:] > reach[:-1]) + 1
    spans = zip(starts[np.r_[0, cuts]], reach[np.r_[cuts - 1, -1]], strict=True)
    return [(int(start), int(stop)) for start, stop in spans]


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sees: torch.Tensor | None,
    softcap: float,
) -> AttentionState:
    """One block.

    Args:
        query: `[Kg, R * G, Dq]`, scaled.
        key: `[Lb, Kg, Dq]`.
        value: `[Lb, Kg, Dv]`.
        sees: bool `[R * G, Lb]`; None: every row sees every key.
        softcap: of the scores; 0: none.

    Returns:
        lse `[Kg, R * G]`; -inf for rows that see nothing here.
    """
    key, value = key.to(query.dtype), value.to(query.dtype)
    scores = torch.bmm(query, key.permute(1, 2, 0))  # [Kg, R * G, Lb]
    if softcap > 0:
        scores.div_(softcap).tanh_().mul_(softcap)
    if sees is not None:
        scores.masked_fill_(~sees, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # Not exp(scores - lse): with scores near 1e4 the rounding of the lse would show in the output.
    out = torch.bmm(torch.softmax(scores, dim=-1), value.transpose(0, 1))
    return AttentionState(out.masked_fill_((lse == -math.inf).unsqueeze(-1), 0.0), lse)
