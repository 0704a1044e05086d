"""The fast backend of plain torch on a CPU: flash where the kernel fits, else blocked products.

Rows are cut by pattern (`stretches`), heads by run length (`head_groups`); every piece is one or
two kernel calls on views of the caller's tensors, or a few tiles of a band. The kernel knows no
soft cap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from heddle.attention.backends.base import Visible, checked_visible
from heddle.attention.backends.blocked import blocked
from heddle.attention.backends.flash import flash
from heddle.attention.backends.head_groups import group_runs
from heddle.attention.backends.stretches import Stretch, find_stretches
from heddle.attention.state import AttentionState, accumulation_dtype, concatenate, merge
from heddle.layout.heads import HeadRun

MIN_FLASH_WINDOW = 64
"""Below this the squares of a band are so small that masked products are as fast."""
_FLASH_DTYPES = (torch.float32, torch.float64)


class TorchBackend:
    """Exact on any float dtype; 16-bit inputs are computed in float32 and not rounded back."""

    name = "torch"

    def unsupported_reasons(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        key_width: int,  # noqa: ARG002 - any width
        value_width: int,  # noqa: ARG002
    ) -> list[str]:
        """See `AttentionBackend.unsupported_reasons`."""
        reasons = []
        if not dtype.is_floating_point:
            reasons.append(f"dtype {dtype}; attention needs floats")
        if device.type != "cpu":
            reasons.append(f"device {device.type}; backend 'torch' needs cpu; 'reference' does not")
        return reasons

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
        first, end = checked_visible(visible, query.shape[0], key.shape[0])
        fits = softcap == 0 and _fits_flash(query, key, value)
        stretches = find_stretches(first, end) if fits else None
        pieces = []
        for group in group_runs(runs):
            parts = (group.queries(query), group.heads(key), group.heads(value))
            lanes = slice(group.start, group.end)
            if stretches is not None:
                for rows, state in _attend_stretches(*parts, stretches, scale):
                    pieces.append((rows, lanes, state))
            elif end.any():
                pieces.append((slice(None), lanes, blocked(*parts, first, end, scale, softcap)))
        if len(pieces) == 1 and pieces[0][2].lse.shape == query.shape[:2]:
            return pieces[0][2]
        dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
        whole = AttentionState.nil((*query.shape[:2], value.shape[-1]), dtype=dtype)
        for rows, lanes, state in pieces:
            whole.out[rows, lanes] = state.out
            whole.lse[rows, lanes] = state.lse
        return whole


def _fits_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    one_dtype = query.dtype == key.dtype == value.dtype
    return one_dtype and query.dtype in _FLASH_DTYPES and key.shape[-1] == value.shape[-1]


def _attend_stretches(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stretches: Sequence[Stretch],
    scale: float,
) -> Iterator[tuple[slice, AttentionState]]:
    """States `[rows, Kg * G]` of one head group, for all rows that see a key.

    Args:
        query: `[R, Kg, G, D]`.
        key: `[L, Kg, D]`.
        value: `[L, Kg, D]`.
        stretches: of the rows.
        scale: of the scores.
    """
    for stretch in stretches:
        rows = slice(stretch.start, stretch.end)
        picked = query if stretch.end - stretch.start == len(query) else query[rows]
        yield rows, _attend_stretch(picked, key, value, stretch, scale)


def _attend_stretch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stretch: Stretch, scale: float
) -> AttentionState:
    """A rectangle, a causal square, both merged, or a band."""
    start, stop = stretch.first_key, stretch.end_key
    if stretch.pattern == "band":
        return _attend_band(query, key[start:], value[start:], stop - start, scale)
    states = []
    if start < stop:
        keys = (key, value) if stop - start == len(key) else (key[start:stop], value[start:stop])
        states.append(_attend_block(query, *keys, scale, is_causal=False))
    if stretch.pattern == "causal":
        square = slice(stop, stop + len(query))
        states.append(_attend_block(query, key[square], value[square], scale, is_causal=True))
    return states[0] if len(states) == 1 else merge(states, strict=False)


def _attend_band(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float
) -> AttentionState:
    """Row i sees keys [i, i + window)."""
    if window < MIN_FLASH_WINDOW:
        first = np.arange(len(query))
        return blocked(query, key, value, first, first + window, scale)
    tile = window - 1
    return concatenate(
        [
            _attend_tile(query[i : i + tile], key[i:], value[i:], window, scale)
            for i in range(0, len(query), tile)
        ]
    )


def _attend_tile(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float
) -> AttentionState:
    """As `_attend_band`, for fewer rows than a window has keys: nothing is computed and masked.

    keys   0 1 2 3 4 5 6     window 5, rows 3
    row 0  a a a r c         a: a square that is causal from its far corner
    row 1    a a r c c       r: the rectangle that every row sees
    row 2      a r c c c     c: a causal square
    """
    rows = len(query)
    corner = _attend_block(
        query.flip(0), key[:rows].flip(0), value[:rows].flip(0), scale, is_causal=True
    )
    states = [AttentionState(corner.out.flip(0), corner.lse.flip(0))]
    if rows < window - 1:
        middle = slice(rows, window - 1)
        states.append(_attend_block(query, key[middle], value[middle], scale, is_causal=False))
    square = slice(window - 1, window - 1 + rows)
    states.append(_attend_block(query, key[square], value[square], scale, is_causal=True))
    return merge(states, strict=False)


def _attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> AttentionState:
    """All rows over all keys, or over a causal square; the flash kernel unless it is in doubt."""
    state = flash(query, key, value, scale, is_causal=is_causal)
    if state is not None:
        return state
    rows = len(query)
    end = np.arange(1, rows + 1) if is_causal else np.full(rows, len(key))
    return blocked(query, key, value, np.zeros_like(end), end, scale)
