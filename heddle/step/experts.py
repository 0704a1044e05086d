"""Whole experts on different ranks: which rank sends a row to them, and what that takes per layer.

The experts of a layer are dealt over the EP group, that is over all ranks of a stage. TP ranks of a
replica hold the same rows, and COPY rows are on every PCP rank, too; a row must still visit its
experts once. So the holders of a row share out the sending:

    distributed row j of PCP rank c      sent by TP rank  j mod tp  of that PCP rank
    COPY row j                           sent by plane rank  j mod (pcp * tp), PCP before TP
    pads                                 sent by nobody

How many rows go where is known only to the router. Ranks first tell each other their counts, and
the two exchanges that follow have room for the largest one, `m`.

Legend: `N` EP ranks, `M` local rows, `E` hidden size, `k` experts per row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from heddle.layout.cache_rows import DTYPE_BYTES
from heddle.layout.rows import RowLayout
from heddle.step.localize import RankStep
from heddle.step.topology import Topology
from heddle.step.traffic import Collective

IntArray = npt.NDArray[np.int64]


def dispatched_rows(step: RankStep, topology: Topology) -> IntArray:
    """Local rows that this rank sends to their experts, ascending.

    Args:
        step: this rank's part of a step.
        topology: constants of the engine.
    """
    tp_size, pcp_size = topology.mesh.tp_size, topology.mesh.pcp_size
    first = step.pcp_rank * step.num_local_rows
    rows = np.flatnonzero(step.plan.rows.valid[first : first + step.num_local_rows])
    plane_rank = step.pcp_rank * tp_size + step.tp_rank
    is_mine = np.where(
        rows < step.num_copy,
        rows % (pcp_size * tp_size) == plane_rank,
        rows % tp_size == step.tp_rank,
    )
    mine: IntArray = rows[is_mine]
    return mine


def expert_calls(rows: RowLayout, topology: Topology) -> Iterator[Collective]:
    """What a layer with experts says before its sum over TP; nothing unless experts are dealt out.

    Counts, rows out, sums back; then sums of COPY rows, of which each PCP rank knows some. A row
    travels with the ids and weights of its experts.

    Args:
        rows: who computes which row.
        topology: constants of the engine.
    """
    moe, num_ranks = topology.model.moe, topology.mesh.group_size("ep")
    if not topology.has_expert_parallel or moe is None or num_ranks == 1:
        return
    hidden, dtype = topology.model.hidden_size, topology.dtype
    # Router weights and returning sums are float32, or wider where the model is.
    wide = dtype if dtype == "float64" else "float32"
    tags = 2 * moe.num_experts_per_token * DTYPE_BYTES[wide] // DTYPE_BYTES[dtype]
    yield Collective("all_gather", "ep", (num_ranks,), "int64")
    yield Collective("all_to_all", "ep", (num_ranks, None, hidden + tags), dtype)
    yield Collective("all_to_all", "ep", (num_ranks, None, hidden), wide)
    if rows.num_copy > 0 and topology.mesh.pcp_size > 1:
        yield Collective("all_reduce", "pcp", (rows.num_copy, hidden), dtype)
