"""Attention of each row and lane alone, with sums in a fixed order.

The bits of a result depend on the query of that row and lane and on the keys that the row sees, in
their order, and on nothing else: no other row, lane or head of the call, no key outside of the
range, no stride, no number of threads. Matrix products promise none of this: their libraries choose
the order of a sum by shape. Here every sum is a tree of elementwise additions,

    x0 x1 x2 x3 x4  ->  x0+x1  x2+x3  x4  ->  (x0+x1)+(x2+x3)  x4  ->  ((x0+x1)+(x2+x3))+x4

which zeros on the right do not change, so that rows with fewer keys may stand beside longer ones.

Legend: `P` pairs of a row and a lane, `R` query rows, `Hq` lanes, `L` keys, `Ks` kv heads, `Dq`,
`Dv` widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from heddle.attention.backends.base import IntArray, Visible, checked_visible
from heddle.attention.state import AttentionState, accumulation_dtype
from heddle.layout.heads import HeadRun

MAX_TERMS = 1 << 21
"""Terms of sums held at once: 8 MiB in float32."""


class ReferenceBackend:
    """Any dtype and width; slow: no matrix products."""

    name = "reference"

    def unsupported_reasons(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG002 - runs where torch runs
        key_width: int,  # noqa: ARG002
        value_width: int,  # noqa: ARG002
    ) -> list[str]:
        """Only floats have a softmax."""
        return [] if dtype.is_floating_point else [f"dtype {dtype}; attention needs floats"]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: Sequence[HeadRun],
        visible: Visible,
        scale: float,
        softcap: float = 0.0,
    ) -> AttentionState:
        """See `AttentionBackend.attend`."""
        num_rows, num_lanes, _ = query.shape
        first, end = checked_visible(visible, num_rows, key.shape[0])
        dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
        state = AttentionState.nil(
            (num_rows, num_lanes, value.shape[-1]), dtype=dtype, device=query.device
        )
        pairs = _pairs(runs, first, end).to(query.device)
        if pairs.shape[1] == 0:
            return state
        width = max(query.shape[-1], value.shape[-1])
        size = max(1, MAX_TERMS // (width * int((end - first).max())))
        for start in range(0, pairs.shape[1], size):
            block = pairs[:, start : start + size]
            part = _attend_block(query, key, value, block, scale, softcap)
            place = block[0], block[1]
            state.out[place], state.lse[place] = part.out, part.lse
        return state


def _pairs(runs: Sequence[HeadRun], first: IntArray, end: IntArray) -> torch.Tensor:
    """Row, lane, kv head, first key and end of all that is to be computed, `[5, P]`."""
    lanes = [(lane, run.kv_index) for run in runs for lane in range(run.start, run.end)]
    lane, head = np.array(lanes, dtype=np.int64).reshape(-1, 2).T
    rows = np.flatnonzero(first < end)
    row = np.repeat(rows, len(lane))
    return torch.from_numpy(
        np.stack([row, np.tile(lane, len(rows)), np.tile(head, len(rows)), first[row], end[row]])
    )


def _attend_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pairs: torch.Tensor,
    scale: float,
    softcap: float,
) -> AttentionState:
    """Gather what each pair meets, and attend.

    Args:
        query: `[R, Hq, Dq]`.
        key: `[L, Ks, Dq]`.
        value: `[L, Ks, Dv]`.
        pairs: `[5, P]`, of `_pairs`; none without keys.
        scale: of the scores.
        softcap: of the scaled scores.

    Returns:
        lse `[P]`.
    """
    dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
    row, lane, head, first, end = pairs
    counts = (end - first)[:, None]
    places = torch.arange(int(counts.max()), device=pairs.device)  # [L]
    # Past its range a pair reads its own last key again, and never another one.
    index = first[:, None] + torch.minimum(places, counts - 1)  # [P, L]
    heads = head[:, None]
    return _attend_pairs(
        query[row, lane].to(dtype),
        key[index, heads].to(dtype),
        value[index, heads].to(dtype),
        places < counts,
        scale,
        softcap,
    )


def _attend_pairs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sees: torch.Tensor,
    scale: float,
    softcap: float,
) -> AttentionState:
    """Attention of each pair over its own keys.

    Args:
        query: `[P, Dq]`.
        key: `[P, L, Dq]`.
        value: `[P, L, Dv]`.
        sees: bool `[P, L]`, the first key of each pair at least.
        scale: of the scores.
        softcap: of the scaled scores.

    Returns:
        lse `[P]`.
    """
    scores = tree_sum((query[:, None] * key).transpose(1, 2)) * scale  # [P, L]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(sees, scores, -math.inf)
    peak = scores.amax(dim=1)
    shares = torch.exp(scores - peak[:, None])
    total = tree_sum(shares)
    out = tree_sum(torch.where(sees[..., None], shares[..., None] * value, 0.0))  # [P, Dv]
    return AttentionState(out / total[:, None], peak + torch.log(total))


def tree_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the second axis of `[P, L, ...]`, L >= 1, in the order drawn above.

    Example:
        >>> tree_sum(torch.arange(6.0).view(1, 3, 2))
        tensor([[6., 9.]])
    """
    while terms.shape[1] > 1:
        last = terms.shape[1] // 2 * 2
        added = terms[:, 0:last:2] + terms[:, 1:last:2]
        terms = torch.cat([added, terms[:, last:]], 1) if last < terms.shape[1] else added
    # Padding would turn a sum of -0.0 alone into 0.0; only 0.0 is left either way.
    return terms[:, 0] + 0.0
