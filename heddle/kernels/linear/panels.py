"""Weights in panels: one copy that serves one row and many.

    weight [K, N]  ->  data [P, K, 16],  P = ceil(N / 16)
    data[n // 16, k, n % 16] == weight[k, n]; what is left of the last panel is zeros

A product of one row walks through a panel from its start to its end, so it reads memory in order,
and threads take whole panels. A product of many rows keeps a stretch of a panel in the first cache
while the rows pass by: two vectors of 8 weights for each input, as a register tile takes them.

Legend: `K` inputs, `N` outputs, `P` panels, `M` rows.
Source: packed operands, Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDTH = 16
"""Outputs of a panel."""


def num_panels(num_outputs: int) -> int:
    """`P`, the last one perhaps partly filled."""
    return -(-num_outputs // WIDTH)


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A matrix of floats, whole or a range of it that is about to be filled."""

    data: torch.Tensor  # [P, K, 16]
    num_outputs: int

    @classmethod
    def zeros(
        cls,
        num_outputs: int,
        num_inputs: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Panels:
        """To be filled in parts, see `part`."""
        shape = (num_panels(num_outputs), num_inputs, WIDTH)
        return cls(torch.zeros(shape, dtype=dtype, device=device), num_outputs)

    @classmethod
    def of(cls, weight: torch.Tensor) -> Panels:
        """A copy of a matrix `[N, K]`, as checkpoints hold it."""
        panels = cls.zeros(*weight.shape, dtype=weight.dtype, device=weight.device)
        panels.write(0, weight)
        return panels

    @property
    def is_meta(self) -> bool:
        """It has a size and no memory."""
        return self.data.is_meta

    @property
    def num_inputs(self) -> int:
        """`K`."""
        return self.data.shape[1]

    def write(self, first: int, rows: torch.Tensor, start: int = 0) -> None:
        """Fill outputs from `first` on, and of each the inputs from `start` on.

        Args:
            first: in `[0, N]`.
            rows: `[n, k]`, in any dtype.
            start: in `[0, K]`.
        """
        until = start + rows.shape[1]
        # Converted before it is turned: what is written then lies in order.
        scatter(self.data[:, start:until], first, rows.to(self.data.dtype))

    def columns(self, outputs: torch.Tensor) -> torch.Tensor:
        """`[m]` places of outputs -> their weights `[m, K]`."""
        return self.data[outputs // WIDTH, :, outputs % WIDTH]

    def matrix(self) -> torch.Tensor:
        """`[K, N]`, a copy."""
        return self.data.transpose(0, 1).flatten(1)[:, : self.num_outputs]


def scatter(target: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Put outputs into panels.

    Args:
        target: `[P, ..., 16]`.
        first: output at which the rows start.
        rows: `[n, ...]`.
    """
    end = first + rows.shape[0]
    while first < end:
        panel, lane = divmod(first, WIDTH)
        whole = (end - first) // WIDTH if lane == 0 else 0
        count = whole * WIDTH or min(end - first, WIDTH - lane)
        part = rows[:count].unflatten(0, (max(whole, 1), -1)).movedim(1, -1)
        target[panel : panel + max(whole, 1), ..., lane : lane + part.shape[-1]] = part
        rows, first = rows[count:], first + count
