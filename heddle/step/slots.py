"""Where the new rows of a step are stored, for all requests at once.

Blocks of all requests lie one after another, so that one lookup serves every row.

Legend: `T` new rows of the step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heddle.step.localize import RankStep
from heddle.step.tables import touched_blocks
from heddle.step.topology import Topology

IntArray = npt.NDArray[np.int64]


def row_slots(step: RankStep, topology: Topology, group: int, place: int) -> IntArray:
    """`[T]`: slot of each new row at a place of its group, or -1 where it is stored elsewhere.

    Args:
        step: the rows.
        topology: constants of the engine.
        group: index of the cache group.
        place: among the ranks that share a sequence's keys.
    """
    known = step.rows
    size = topology.kv_layout(group).virtual_block_size
    blocks, first_block = touched_blocks(step.plan.batch.requests, group, size)
    pages = blocks[first_block[known.request] + known.position // size]
    found = np.empty_like(known.position)
    for start_rank in np.unique(known.start_rank).tolist():
        rows = known.start_rank == start_rank
        layout = topology.kv_layout(group, start_rank)
        found[rows] = layout.slots_in(pages[rows], known.position[rows], place)
    return found
