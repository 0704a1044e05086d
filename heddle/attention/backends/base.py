"""Attention of some query rows over the keys that one rank has at hand.

A backend computes, it does not know about ranks. It returns a true log-sum-exp, natural, float32 or
wider, or it says in words why it cannot.

Legend: `R` query rows, `Hq` query-head lanes, `L` keys, `Ks` kv heads, `Dq` and `Dv` key and value
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from heddle.attention.state import AttentionState
from heddle.layout.heads import HeadRun

Visible = npt.NDArray[np.int64] | int
"""Keys that each row sees, from the first one on: `[R]`, or one number for all rows."""


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
    ) -> AttentionState:
        """Softmax attention of each row over its first keys.

        Rows that see no key, and lanes in no run, come out as nil exactly, whatever they hold. Keys
        beyond the largest visible length are never read and may hold NaN. A NaN that some row does
        see may reach the other rows of the call; it never fails to reach a row that sees it.

        Args:
            query: `[R, Hq, Dq]`; any strides.
            key: `[L, Ks, Dq]`; any strides, usually a view.
            value: `[L, Ks, Dv]`; any strides, may alias `key`.
            runs: lanes [start, end) read kv head kv_index; disjoint.
            visible: row i sees keys [0, visible[i]); 0 <= visible[i] <= L.
            scale: multiplies the scores before the softmax; part of the lse.

        Returns:
            out `[R, Hq, Dv]`, lse `[R, Hq]`.

        Raises:
            ValueError: `visible` has a value outside [0, L], or not one value per row.
        """
        ...


def checked_visible(visible: Visible, num_rows: int, num_keys: int) -> npt.NDArray[np.int64]:
    """One visible length per row, `[R]`.

    Raises:
        ValueError: a value outside [0, L], or not one value per row.
    """
    lengths = np.full(num_rows, visible) if isinstance(visible, int) else visible
    if lengths.shape != (num_rows,):
        raise ValueError(f"visible has shape {lengths.shape}; {num_rows} rows need one length each")
    if num_rows == 0:
        return lengths
    least = most = int(lengths[0])
    if num_rows > 1:  # a decode row, in every layer of every step, needs no reductions
        least, most = int(lengths.min()), int(lengths.max())
    if not 0 <= least <= most <= num_keys:
        raise ValueError(f"visible lengths {least}..{most} must be within the {num_keys} keys")
    return lengths
