"""Sparse top-k attention in a step: sizes of lists, and the calls of one layer.

Queries travel, whatever the class of their rows, and each rank's list of best keys with them:

    COPY rows          queries over the slice                    lists over DCP    partials return
    distributed rows   queries over DCP, index queries over PCP  lists over DCP    partials return

The rows of the indexer are whole on every TP rank, so they travel between PCP ranks only.

Legend: `n` rows of a class that a rank owns, `Hi`, `Di` heads and width of the indexer, `K` places
of a list, `N = P' * k` DCP ranks: PCP ranks times ranks of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator

from heddle.config.model import SparseConfig
from heddle.layout.kv import KVLayout
from heddle.layout.mesh import GroupKind
from heddle.layout.rows import RowClass
from heddle.step.exchanges import ExchangeSizes, new_rows_gather, partials_return, query_gather
from heddle.step.plan import StepPlan
from heddle.step.topology import Topology
from heddle.step.traffic import Collective

SPARSE_GROUP = 0
"""Sparse layers see everything, so their model has one cache group."""


def sparse_calls(plan: StepPlan, topology: Topology, sizes: ExchangeSizes) -> Iterator[Collective]:
    """The calls of the attention of one sparse layer.

    Args:
        plan: of the step.
        topology: constants of the engine; its model is sparse.
        sizes: of this rank.
    """
    rows = plan.rows
    yield from new_rows_gather(plan.groups[SPARSE_GROUP].new_rows, rows.num_distributed, sizes)
    if sizes.world_size == 1:
        return
    for is_copy, num_rows in ((True, rows.num_copy), (False, rows.num_distributed)):
        if num_rows > 0:
            yield from query_gather(num_rows, sizes, is_copy=is_copy)
            yield from _choice(plan, topology, sizes, num_rows, is_copy=is_copy)
            returns = return_exchange(plan, is_copy=is_copy)
            yield from partials_return(returns, num_rows, sizes, is_copy=is_copy)


def _choice(
    plan: StepPlan, topology: Topology, sizes: ExchangeSizes, num_rows: int, *, is_copy: bool
) -> Iterator[Collective]:
    """Index queries to the keys, and every rank's best keys to all."""
    sparse = topology.model.sparse
    assert sparse is not None, "asked for a sparse model only"
    group = None if is_copy else index_group(sizes.num_replicas, sizes.slice_size)
    if group is not None:
        width = sparse.head_dim + _weight_places(sizes.dtype)
        yield Collective("all_gather", group, (num_rows, sparse.num_heads, width), sizes.dtype)
    rows = num_rows if is_copy else sizes.num_replicas * num_rows
    longest = longest_context(plan, is_copy=is_copy)
    width = list_width(sparse, topology.kv_layout(SPARSE_GROUP), longest)
    yield Collective("all_gather", "dcp", (rows, width, 2), "int32")


def _weight_places(dtype: str) -> int:
    """A weight has at least 32 bits and travels among the elements of a query."""
    return 2 if dtype in ("bfloat16", "float16") else 1


def list_width(sparse: SparseConfig, layout: KVLayout, longest: int) -> int:
    """`K`: places that no rank's list of best keys exceeds.

    Args:
        sparse: of the model.
        layout: of any chain; its start rank has no effect.
        longest: most keys that a row of the class sees on all ranks together, over the whole batch.
    """
    return min(sparse.top_k, layout.max_local_len(longest))


def longest_context(plan: StepPlan, *, is_copy: bool) -> int:
    """Most keys that a row of a class sees, over the whole batch; 0 without rows."""
    return max(
        (
            request.num_computed_tokens + len(request.token_ids)
            for request, row_class in zip(plan.batch.requests, plan.rows.classes, strict=True)
            if (row_class is RowClass.COPY) == is_copy and request.token_ids
        ),
        default=0,
    )


def return_exchange(plan: StepPlan, *, is_copy: bool) -> str:
    """How the partials of a class return."""
    classes = plan.groups[SPARSE_GROUP].classes
    if is_copy:
        return classes[RowClass.COPY].returns
    split, whole = classes[RowClass.SPLIT], classes[RowClass.WHOLE]
    return split.returns if split.context == "chosen" else whole.returns


def index_group(num_replicas: int, slice_size: int) -> GroupKind | None:
    """The group whose members are the PCP ranks of a DCP group, once each; None: there is one.

    A DCP group with slices spans the whole PCP axis, one without has PCP ranks alone.
    """
    if num_replicas == 1:
        return None
    return "pcp" if slice_size > 1 else "dcp"
