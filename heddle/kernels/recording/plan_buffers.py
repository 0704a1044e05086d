"""A plan of paged attention on a device, in memory that every step writes anew and none moves.

A captured launch holds addresses, and its grid follows from sizes. So the buffers have room for the
most rows and blocks that may come, and the splits of a row are those of the longest context.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from heddle.kernels.paged_decode.plan import PagedPlan
from heddle.kernels.paged_decode.triton_plan import DevicePlan


class PlanBuffers:
    """Room for the plans of steps of some row count.

    Args:
        num_rows: `R`, pads included; each may read a table of its own.
        max_blocks: `B`, of one sequence.
        block_size: rows of a block.
        device: on which the plan is read.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        def room(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.plan = DevicePlan(
            room(num_rows, max_blocks),
            room(num_rows),
            room(num_rows),
            room(num_rows),
            block_size,
            longest=max_blocks * block_size,
        )
        """What kernels are given, in every step."""

    def take(self, plan: PagedPlan) -> None:
        """Say what a plan says; rows beyond its own meet nothing.

        Args:
            plan: of at most as many rows, tables and blocks.

        Raises:
            ValueError: there is no room for it, or its blocks have another size.
        """
        kept = self.plan
        if plan.block_size != kept.block_size:
            raise ValueError(f"block_size={plan.block_size}; must be {kept.block_size}, as made")
        rows, tables = (len(plan.table_of_row),), plan.block_tables.shape
        if rows > tuple(kept.first.shape) or any(
            size > most for size, most in zip(tables, kept.block_tables.shape, strict=True)
        ):
            raise ValueError(
                f"{rows[0]} rows with block tables {list(tables)}; there is room for "
                f"{len(kept.first)} rows with block tables {list(kept.block_tables.shape)}"
            )
        _fill(kept.block_tables, plan.block_tables)
        _fill(kept.table_of_row, plan.table_of_row)
        _fill(kept.first, plan.first)
        _fill(kept.end, plan.end)


def _fill(kept: torch.Tensor, new: npt.NDArray[np.int64]) -> None:
    """In one copy; what is not said is 0."""
    whole = np.zeros(tuple(kept.shape), dtype=np.int32)
    whole[tuple(map(slice, new.shape))] = new
    kept.copy_(torch.from_numpy(whole))
