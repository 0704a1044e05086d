"""New KV of distributed rows as one rank receives it.

    own, gather    | rows of PCP rank 0, pads | rows of rank 1, pads | ...
    halo           | m rows from rank 0 | m rows from rank 1 | ... | own rows, pads |

Legend: `P` PCP ranks, `n` distributed rows of a rank, `m` rows that one rank hands to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle.step.class_plan import GroupPlan
from heddle.step.localize import RankStep
from heddle.step.new_rows import Halo, place_of
from heddle.step.topology import Topology

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """Which rows arrive, and where those lie that this rank's own rows may see."""

    received: IntArray
    """Global row of each row that arrives, own ones included; -1 on pads."""
    held: IntArray
    """Global rows that are kept at hand for the self part, ascending."""
    order: IntArray
    """Where each of them lies in `received`."""
    sends: IntArray | None = None
    """Halo: `[P, m]`, own distributed rows that each PCP rank gets; pads repeat row 0."""

    def find(self, global_row: int) -> int:
        """Place of a row among those at hand."""
        return int(np.searchsorted(self.held, global_row))


def new_rows_of(step: RankStep, topology: Topology, plan: GroupPlan) -> NewRows:
    """The new rows on this rank, of the cache group that has the plan."""
    rows = step.plan.rows
    shape = (rows.pcp_size, rows.num_local_rows)
    is_row = rows.valid.reshape(shape)[:, rows.num_copy :]
    dealt = np.where(is_row, rows.gather.reshape(shape)[:, rows.num_copy :], -1)  # [P, n]
    if plan.halo is not None:
        return _through_halo(step, topology, plan.halo, dealt[step.pcp_rank], plan.halo_rows)
    received = dealt.reshape(-1)
    return NewRows(
        received=received, held=np.sort(received[received >= 0]), order=rows.distributed_order
    )


def _through_halo(
    step: RankStep, topology: Topology, halo: Halo, own: IntArray, size: int
) -> NewRows:
    me, pcp_ranks = step.pcp_rank, range(topology.mesh.pcp_size)
    place = place_of(topology, me, step.tp_rank)
    sends = np.zeros((len(pcp_ranks), size), dtype=np.int64)
    blocks = []
    for other in pcp_ranks:
        block = np.full(size, -1, dtype=np.int64)
        if other != me:
            target = place_of(topology, other, step.tp_rank)
            handed = halo.place[halo.handed_over(me, other, target)]
            sends[other, : len(handed)] = handed
            arrived = halo.handed_over(other, me, place)
            block[: len(arrived)] = arrived
        blocks.append(block)
    received = np.concatenate([*blocks, own])
    kept = np.flatnonzero((received >= 0) & halo.seen[me, received])
    order = kept[np.argsort(received[kept])]
    return NewRows(received=received, held=received[order], order=order, sends=sends)
