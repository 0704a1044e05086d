"""Rows of a step by the adapter that they go through; found once, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Rows = slice | torch.Tensor
"""Places among the `M` rows: a run of them, or `[n]` int64 ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The rows that go through some adapter; others are in no group."""

    groups: tuple[tuple[int, Rows], ...]
    """Slots by ascending number, each with its rows."""

    @classmethod
    def of(cls, slots: npt.NDArray[np.int64]) -> AdapterRows | None:
        """Group rows.

        Args:
            slots: `[M]`, the slot of each row; -1: none.

        Returns:
            None if no row goes through any.
        """
        used = [int(slot) for slot in np.unique(slots) if slot >= 0]
        if not used:
            return None
        return cls(tuple((slot, _places(np.flatnonzero(slots == slot))) for slot in used))


def _places(rows: npt.NDArray[np.int64]) -> Rows:
    """A run needs no copies of rows."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    return torch.from_numpy(rows)
