"""The fast backend of plain torch on a CPU: flash where the kernel fits, else blocked products.

Rows are cut by pattern (`stretches`), heads by run length (`head_groups`); every piece is one or
two kernel calls on views of the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from heddle.attention.backends.base import Visible, checked_visible
from heddle.attention.backends.blocked import blocked
from heddle.attention.backends.flash import flash
from heddle.attention.backends.head_groups import group_runs
from heddle.attention.backends.stretches import Stretch, find_stretches
from heddle.attention.state import AttentionState, accumulation_dtype, merge
from heddle.layout.heads import HeadRun

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
    ) -> AttentionState:
        """See `AttentionBackend.attend`."""
        lengths = checked_visible(visible, query.shape[0], key.shape[0])
        stretches = find_stretches(lengths) if _fits_flash(query, key, value) else None
        pieces = []
        for group in group_runs(runs):
            parts = (group.queries(query), group.heads(key), group.heads(value))
            lanes = slice(group.start, group.end)
            for rows, state in _attend_group(*parts, lengths, stretches, scale):
                pieces.append((rows, lanes, state))
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


def _attend_group(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: npt.NDArray[np.int64],
    stretches: Sequence[Stretch] | None,
    scale: float,
) -> Iterator[tuple[slice, AttentionState]]:
    """States `[rows, Kg * G]` of one head group, for all rows that see a key.

    Args:
        query: `[R, Kg, G, Dq]`.
        key: `[L, Kg, Dq]`.
        value: `[L, Kg, Dv]`.
        visible: `[R]`.
        stretches: None: rows are masked one by one.
        scale: of the scores.
    """
    if stretches is None:
        if visible.any():
            yield slice(None), blocked(query, key, value, visible, scale)
        return
    for stretch in stretches:
        rows = slice(stretch.start, stretch.end)
        picked = query if stretch.end - stretch.start == len(query) else query[rows]
        yield rows, _attend_stretch(picked, key, value, stretch, scale)


def _attend_stretch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stretch: Stretch, scale: float
) -> AttentionState:
    """A rectangle, a causal square, or both merged."""
    states, cut = [], stretch.rectangle
    if cut > 0:
        before = (key, value) if cut == len(key) else (key[:cut], value[:cut])
        states.append(_attend_block(query, *before, scale, is_causal=False))
    if stretch.is_causal:
        square = slice(cut, cut + len(query))
        states.append(_attend_block(query, key[square], value[square], scale, is_causal=True))
    return states[0] if len(states) == 1 else merge(states, strict=False)


def _attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> AttentionState:
    """All rows over all keys, or over a causal square; the flash kernel unless it is in doubt."""
    state = flash(query, key, value, scale, is_causal=is_causal)
    if state is not None:
        return state
    rows = len(query)
    visible = np.arange(1, rows + 1) if is_causal else np.full(rows, len(key))
    return blocked(query, key, value, visible, scale)
