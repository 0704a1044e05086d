"""Attention of some query rows over the keys that one rank has at hand.

A backend computes, it does not know about ranks. It returns a true log-sum-exp, natural, float32 or
wider, or it says in words why it cannot. A row sees one range of the keys; two ranges, or sinks,
are several states that the caller merges.

Legend: `R` query rows, `Hq` query-head lanes, `L` keys, `Ks` kv heads, `Dq` and `Dv` key and value
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from heddle.attention.state import AttentionState
from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.layout.cache_rows import RowFormat
from heddle.layout.heads import HeadRun

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeyRange:
    """Row i sees keys [first[i], end[i]) of those given; none where first[i] >= end[i]."""

    first: IntArray | int
    """`[R]`, or one number for all rows."""
    end: IntArray | int
    """`[R]`, or one number for all rows."""

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What a backend derives from the ranges, for the other layers of a step."""
        return {}


Visible = KeyRange | IntArray | int
"""Keys that each row sees; an array `[R]` or a number alone is an end, from key 0 on."""


class AttentionBackend(Protocol):
    """Local attention with a true log-sum-exp."""

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    def unsupported_reasons(
        self, *, dtype: torch.dtype, device: torch.device, key_width: int, value_width: int
    ) -> list[str]:
        """Everything that stands in the way of such tensors; empty when nothing does."""
        ...

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
        """Softmax attention of each row over its range of keys.

        Rows that see no key, and lanes in no run, come out as nil exactly, whatever they hold. Keys
        that no row sees are never read and may hold NaN. A NaN that some row does see may reach the
        other rows of the call; it never fails to reach a row that sees it.

        Args:
            query: `[R, Hq, Dq]`; any strides.
            key: `[L, Ks, Dq]`; any strides, usually a view.
            value: `[L, Ks, Dv]`; any strides, may alias `key`.
            runs: lanes [start, end) read kv head kv_index; disjoint.
            visible: which keys each row sees.
            scale: multiplies the scores before the softmax; part of the lse.
            softcap: c > 0 turns a scaled score s into c * tanh(s / c), also in the lse; 0: none.

        Returns:
            out `[R, Hq, Dv]`, lse `[R, Hq]`.

        Raises:
            ValueError: `visible` leaves [0, L], or has not one value per row.
        """
        ...


@runtime_checkable
class PagedBackend(AttentionBackend, Protocol):
    """A backend that also meets stored rows where they lie, as they are kept."""

    def attend_paged(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        plan: PagedPlan,
        widths: RowWidths,
        runs: Sequence[HeadRun],
        scale: float,
        softcap: float = 0.0,
        row_format: RowFormat | None = None,
    ) -> AttentionState:
        """As `heddle.kernels.paged_decode.reference`, which says what each argument is; `runs` as
        for `attend`.
        """
        ...


def checked_visible(visible: Visible, num_rows: int, num_keys: int) -> tuple[IntArray, IntArray]:
    """First key and end of each row, both `[R]`; rows that see nothing are [0, 0).

    Raises:
        ValueError: an end outside [0, L], a first key below 0, or not one value per row.

    Example:
        >>> checked_visible(KeyRange(2, np.array([4, 1])), num_rows=2, num_keys=4)
        (array([2, 0]), array([4, 0]))
    """
    if not isinstance(visible, KeyRange):
        end = _each_row(visible, num_rows)
        _check_bounds(end, num_keys)
        return np.zeros(num_rows, dtype=np.int64), end
    first, end = _each_row(visible.first, num_rows), _each_row(visible.end, num_rows)
    _check_bounds(end, num_keys)
    if num_rows and int(first.min()) < 0:
        raise ValueError(f"first visible key {int(first.min())}; must be at least 0")
    sees = first < end
    return (first, end) if sees.all() else (first * sees, end * sees)


def _each_row(values: IntArray | int, num_rows: int) -> IntArray:
    if isinstance(values, int):
        return np.full(num_rows, values)
    if values.shape != (num_rows,):
        raise ValueError(f"visible has shape {values.shape}; {num_rows} rows need one length each")
    return values


def _check_bounds(end: IntArray, num_keys: int) -> None:
    if len(end) == 0:
        return
    least = most = int(end[0])
    if len(end) > 1:  # a decode row, in every layer of every step, needs no reductions
        least, most = int(end.min()), int(end.max())
    if not 0 <= least <= most <= num_keys:
        raise ValueError(f"visible lengths {least}..{most} must be within the {num_keys} keys")
