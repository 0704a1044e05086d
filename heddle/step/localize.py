"""One plan -> what one rank does: its rows, its slots, its visible keys.

Local rows come in this order, the same number on every rank:

    | COPY rows | WHOLE rows of this rank, pads | SPLIT rows of this rank, pads |
    0                                                                          M

Rows are common to all layers. What they see, and where they are stored, is derived once per cache
group (`heddle.step.local_group`).

Legend: `M` local rows, `P` PCP size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from heddle.step.plan import StepPlan
from heddle.step.topology import Topology

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GlobalRows:
    """What is known of each global row of a step, `[T]`."""

    request: IntArray
    """Index of the request in the batch."""
    position: IntArray
    token: IntArray
    start_rank: IntArray
    """`u` of the request's block chains."""

    @classmethod
    def of(cls, plan: StepPlan) -> GlobalRows:
        """The rows of all requests, one request after another."""
        requests = plan.batch.requests
        counts = np.array([len(request.token_ids) for request in requests], dtype=np.int64)
        cached = np.array([r.num_computed_tokens for r in requests], dtype=np.int64)
        starts = np.array([request.start_rank for request in requests], dtype=np.int64)
        first = np.cumsum(counts) - counts
        tokens = chain.from_iterable(request.token_ids for request in requests)
        total = int(counts.sum())
        return cls(
            np.repeat(np.arange(len(requests)), counts),
            np.arange(total, dtype=np.int64) + np.repeat(cached - first, counts),
            np.fromiter(tokens, np.int64, total),
            np.repeat(starts, counts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """This rank's part of a step, as far as it is the same for every layer."""

    plan: StepPlan
    global_rank: int
    pcp_rank: int
    tp_rank: int
    dcp_rank: int
    rows: GlobalRows
    token_ids: IntArray
    """`[M]`; 0 on pads."""
    positions: IntArray
    """`[M]`; 0 on pads."""
    request_of_row: IntArray
    """`[M]`: index of the request in the batch; -1 on pads."""

    @property
    def num_copy(self) -> int:
        """Leading local rows that every PCP rank holds."""
        return self.plan.rows.num_copy

    @property
    def num_distributed(self) -> int:
        """Local rows that follow, pads included."""
        return self.plan.rows.num_distributed

    @property
    def num_local_rows(self) -> int:
        """`M`."""
        return self.plan.rows.num_local_rows

    def per_row(self, values: Sequence[int], pad: int) -> IntArray:
        """`[M]`: the value of each row's request, `pad` on pads.

        Args:
            values: one per request of the batch.
            pad: for rows that are nobody's.
        """
        return np.array([*values, pad], dtype=np.int64)[self.request_of_row]


def localize(plan: StepPlan, topology: Topology, global_rank: int) -> RankStep:
    """This rank's part of a plan.

    Args:
        plan: the plan that all ranks share.
        topology: constants of the engine.
        global_rank: rank in the world.
    """
    coord = topology.mesh.coord_of(global_rank)
    rows, per_rank = plan.rows, plan.rows.num_local_rows
    valid = rows.valid[coord.pcp * per_rank : (coord.pcp + 1) * per_rank]
    everything = GlobalRows.of(plan)
    local = rows.local_rows(coord.pcp)
    if len(everything.token) == 0:
        token_ids = positions = np.zeros(per_rank, dtype=np.int64)
        request_of_row = np.full(per_rank, -1, dtype=np.int64)
    else:
        token_ids = np.where(valid, everything.token[local], 0)
        positions = np.where(valid, everything.position[local], 0)
        request_of_row = np.where(valid, everything.request[local], -1)
    return RankStep(
        plan=plan,
        global_rank=global_rank,
        pcp_rank=coord.pcp,
        tp_rank=coord.tp,
        dcp_rank=topology.dcp_position(global_rank),
        rows=everything,
        token_ids=token_ids,
        positions=positions,
        request_of_row=request_of_row,
    )
