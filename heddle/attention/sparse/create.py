"""One step on one rank -> its classes of rows in the sparse layers.

Legend: `n` local rows of a class, pads included; `P'` PCP ranks in a DCP group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from heddle.attention.resources import AttentionResources
from heddle.attention.sparse.choice import IntArray, RequestRows
from heddle.attention.sparse.rows import SparseClass, SparseRows
from heddle.step.localize import RankStep
from heddle.step.sparse import (
    SPARSE_GROUP,
    index_group,
    list_width,
    longest_context,
    return_exchange,
)
from heddle.step.topology import Topology


def create_sparse_rows(step: RankStep, resources: AttentionResources) -> list[SparseRows]:
    """The classes that the step has rows of: COPY, then all distributed rows as one class."""
    return [
        SparseRows(rows, resources.store, resources.groups)
        for rows in _classes(step, resources)
        if rows.placement.num_rows > 0
    ]


def _classes(step: RankStep, resources: AttentionResources) -> Iterator[SparseClass]:
    topology, plan = resources.topology, step.plan
    sparse = topology.model.sparse
    assert sparse is not None, "the model has sparse layers"
    mesh = topology.mesh
    for is_copy in (True, False):
        num_rows = step.num_copy if is_copy else step.num_distributed
        start = 0 if is_copy else step.num_copy
        pcp_ranks = [step.pcp_rank] if is_copy else _group_pcp_ranks(step.pcp_rank, topology)
        longest = longest_context(plan, is_copy=is_copy)
        yield SparseClass(
            start=start,
            requests=tuple(_requests(step, topology, pcp_ranks, start, num_rows)),
            placement=resources.placement(step, num_rows, is_copy=is_copy),
            width=list_width(sparse, topology.kv_layout(SPARSE_GROUP), longest),
            top_k=sparse.top_k,
            exchange=resources.exchange(return_exchange(plan, is_copy=is_copy)),
            index_group=None if is_copy else index_group(mesh.num_replicas, mesh.slice_size),
        )


def _group_pcp_ranks(pcp_rank: int, topology: Topology) -> list[int]:
    """PCP ranks of a DCP group, in the order of its row blocks."""
    replicas = topology.mesh.num_replicas
    first = pcp_rank // replicas * replicas
    return list(range(first, first + replicas))


def _requests(
    step: RankStep, topology: Topology, pcp_ranks: Sequence[int], start: int, num_rows: int
) -> Iterator[RequestRows]:
    """The gathered rows of each request; pads belong to none."""
    layout = step.plan.rows
    local = [rank * layout.num_local_rows + start + np.arange(num_rows) for rank in pcp_ranks]
    gathered = np.concatenate(local)
    global_rows: IntArray = np.where(layout.valid[gathered], layout.gather[gathered], -1)
    for index, request in enumerate(step.plan.batch.requests):
        first, end = layout.request_starts[index], layout.request_starts[index + 1]
        rows = np.flatnonzero((global_rows >= first) & (global_rows < end))
        if len(rows) > 0:
            yield RequestRows(
                rows=rows,
                positions=step.rows.position[global_rows[rows]],
                block_table=request.table(SPARSE_GROUP),
                layout=topology.kv_layout(SPARSE_GROUP, request.start_rank),
            )
