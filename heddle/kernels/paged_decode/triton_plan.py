"""What the kernel is told, made once per step: indices on the device, groups of lanes, splits.

A group is up to `block_lanes` lanes that read one kv head, however uneven the cut of heads is;
lanes that read none are groups too, so that they come out nil like all others.

    kv_head_of_lane   0 0 0 1 -1 1 1      groups   head 0: 0 1 2    head 1: 3 5 6    none: 4

Legend: `R` rows, `Hq` lanes, `S` sequences, `B` blocks of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from heddle.kernels.paged_decode.plan import PagedPlan
from heddle.kernels.triton_math import MIN_DOT_SIDE, padded

MIN_SPLIT = 256
"""Keys of a split at least: its state weighs as much as a few of them."""
MAX_SPLITS = 128
PROGRAMS_PER_PROCESSOR = 2
"""Programs that each multiprocessor is to find."""


@dataclass(frozen=True, slots=True)
class LaneGroups:
    """Lanes by the kv head that they read."""

    heads: torch.Tensor
    """`[groups]` int32; -1: lanes that read nothing."""
    lanes: torch.Tensor
    """`[groups, block_lanes]` int32; -1: no lane."""

    @classmethod
    def of(
        cls, kv_head_of_lane: npt.NDArray[np.int32], most: int, device: torch.device
    ) -> LaneGroups:
        """Group lanes; at most `most` of them, a power of two, in a group."""
        of_head = {
            int(head): np.flatnonzero(kv_head_of_lane == head)
            for head in np.unique(kv_head_of_lane)
        }
        widest = max((len(lanes) for lanes in of_head.values()), default=1)
        size = min(most, padded(widest, MIN_DOT_SIDE))
        heads, groups = [], []
        for head, lanes in of_head.items():
            for start in range(0, len(lanes), size):
                part = lanes[start : start + size]
                heads.append(max(head, -1))
                groups.append(np.pad(part, (0, size - len(part)), constant_values=-1))
        table = np.array(groups, dtype=np.int32).reshape(-1, size)
        return cls(
            torch.tensor(heads, dtype=torch.int32, device=device),
            torch.from_numpy(table).to(device),
        )


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A `PagedPlan` on a device; int32."""

    block_tables: torch.Tensor
    """`[S, B]`."""
    table_of_row: torch.Tensor
    """`[R]`."""
    first: torch.Tensor
    """`[R]`."""
    end: torch.Tensor
    """`[R]`."""
    block_size: int
    longest: int
    """Keys that a row meets at most."""

    @classmethod
    def of(cls, plan: PagedPlan, device: torch.device) -> DevicePlan:
        """Copy what the kernel reads."""
        arrays = (plan.block_tables, plan.table_of_row, plan.first, plan.end)
        tables, table_of_row, first, end = (
            torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays
        )
        longest = int((plan.end - plan.first).max(initial=0))
        return cls(tables, table_of_row, first, end, plan.block_size, longest)


def choose_splits(num_programs: int, longest: int, device: torch.device) -> int:
    """Splits of each row's keys, so that the device is busy.

    Args:
        num_programs: rows times groups.
        longest: keys that a row meets at most.
        device: with its count of multiprocessors; one without any gets one split.
    """
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // max(1, num_programs))
    return max(1, min(wanted, longest // MIN_SPLIT, MAX_SPLITS))
