"""Norms that need all heads of a row, which tensor-parallel ranks hold apart.

    sum over TP of [M, 2]    squares of a row's queries and of its keys, in front of attention

Legend: `M` local rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from heddle.layout.rows import RowLayout
from heddle.step.topology import Topology
from heddle.step.traffic import Collective


def norm_sums(rows: RowLayout, topology: Topology) -> Iterator[Collective]:
    """What an attention layer says before its exchanges; nothing unless its norms are that wide.

    Args:
        rows: who computes which row.
        topology: constants of the engine.
    """
    if topology.model.qk_width_norm and topology.mesh.tp_size > 1:
        wide = "float64" if topology.dtype == "float64" else "float32"
        yield Collective("all_reduce", "tp", (rows.num_local_rows, 2), wide)
