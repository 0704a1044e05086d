"""Adjacent head runs of equal length, so that one kernel call serves them all.

Legend: `Kg` kv heads of a group, `G` query lanes of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from heddle.layout.heads import HeadRun


class HeadGroup(NamedTuple):
    """kv heads [kv_start, kv_start + num_kv), each read by `run_lanes` lanes from `start` on."""

    kv_start: int
    num_kv: int
    start: int
    run_lanes: int

    @property
    def end(self) -> int:
        """One past the last lane."""
        return self.start + self.num_kv * self.run_lanes

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """View of `[R, Hq, D]` as `[R, Kg, G, D]`."""
        count = self.end - self.start
        lanes = query if count == query.shape[1] else query.narrow(1, self.start, count)
        return lanes.view(len(query), self.num_kv, self.run_lanes, query.shape[-1])

    def heads(self, rows: torch.Tensor) -> torch.Tensor:
        """View of keys or values `[L, Ks, D]` as `[L, Kg, D]`."""
        if self.num_kv == rows.shape[1]:
            return rows
        return rows.narrow(1, self.kv_start, self.num_kv)


def group_runs(runs: Sequence[HeadRun]) -> list[HeadGroup]:
    """Join runs while lanes and kv heads follow each other and lengths agree.

    Example:
        >>> for group in group_runs([HeadRun(0, 0, 3), HeadRun(1, 3, 6), HeadRun(2, 6, 8)]):
        ...     print(group)
        HeadGroup(kv_start=0, num_kv=2, start=0, run_lanes=3)
        HeadGroup(kv_start=2, num_kv=1, start=6, run_lanes=2)
    """
    groups: list[HeadGroup] = []
    for kv_index, start, end in runs:
        last = groups[-1] if groups else None
        joins = (
            last is not None
            and last.end == start
            and last.kv_start + last.num_kv == kv_index
            and last.run_lanes == end - start
        )
        if joins and last is not None:
            groups[-1] = last._replace(num_kv=last.num_kv + 1)
        elif end > start:
            groups.append(HeadGroup(kv_index, 1, start, end - start))
    return groups


def heads_of_lanes(num_lanes: int, runs: Sequence[HeadRun]) -> npt.NDArray[np.int32]:
    """`[num_lanes]`: the kv head that each lane reads, -1 for lanes in no run; read-only.

    Example:
        >>> heads_of_lanes(4, [HeadRun(0, 0, 1), HeadRun(1, 1, 3)]).tolist()
        [0, 1, 1, -1]
    """
    return _heads_of_lanes(num_lanes, tuple(runs))


@cache
def _heads_of_lanes(num_lanes: int, runs: tuple[HeadRun, ...]) -> npt.NDArray[np.int32]:
    heads = np.full(num_lanes, -1, dtype=np.int32)
    for run in runs:
        heads[run.start : run.end] = run.kv_index
    heads.flags.writeable = False
    return heads
