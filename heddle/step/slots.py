"""Where the new rows of a step are stored, for all requests at once.

Block tables of all requests lie one after another, so that one lookup serves every row.

Legend: `T` new rows of the step, `B` requests.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from heddle.step.batch import GlobalBatch
from heddle.step.localize import RankStep
from heddle.step.topology import Topology

IntArray = npt.NDArray[np.int64]


def joined_tables(batch: GlobalBatch, group: int) -> tuple[IntArray, IntArray]:
    """Block tables of a cache group in one array, and where that of each request begins, `[B]`."""
    tables = [request.block_tables[group] for request in batch.requests]
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    joined = np.fromiter(chain.from_iterable(tables), np.int64, int(lengths.sum()))
    return joined, np.cumsum(lengths) - lengths


def row_slots(step: RankStep, topology: Topology, group: int, place: int) -> IntArray:
    """`[T]`: slot of each new row at a place of its group, or -1 where it is stored elsewhere.

    Args:
        step: the rows.
        topology: constants of the engine.
        group: index of the cache group.
        place: among the ranks that share a sequence's keys.
    """
    joined, first_block = joined_tables(step.plan.batch, group)
    known = step.rows
    size = topology.kv_layout(group).virtual_block_size
    pages = joined[first_block[known.request] + known.position // size]
    found = np.empty_like(known.position)
    for start_rank in np.unique(known.start_rank).tolist():
        rows = known.start_rank == start_rank
        layout = topology.kv_layout(group, start_rank)
        found[rows] = layout.slots_in(pages[rows], known.position[rows], place)
    return found
