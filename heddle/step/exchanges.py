"""What each exchange sends, said once: the schedule lists it, `auto` prices it, ranks obey it.

    gather_q     queries over the DCP group (COPY rows: over the slice), partials return
    pass_q       queries round the DCP group in N - 1 hops, partials return in one all-to-all
    gather_kv    cached context, one gather per chunk
    ring_kv      cached context, whole shards round the DCP group in N - 1 hops

Where the ranks of a slice project each other's queries, only row blocks are left to be gathered.

Legend: `N = P' * k` DCP ranks (`P'` PCP, `k` TP ranks), `n` rows of a class and `h` query-head
lanes of a rank, `Dq`, `Do` widths of a travelling query and of a partial, `Ks` stored kv heads,
`W'` elements of a stored row (which travels as it is kept), `X` lanes of a merge that one rank
holds, `m` rows of a halo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import TYPE_CHECKING

from heddle.layout.cache_rows import row_format
from heddle.layout.mesh import GroupKind
from heddle.layout.rows import RowClass
from heddle.step.context import ContextChunk
from heddle.step.topology import Topology
from heddle.step.traffic import Collective

if TYPE_CHECKING:
    from heddle.step.class_plan import ClassPlan

RETURNS = ("ag_rs", "ag_ar", "a2a", "a2a_fine")
"""Ways back for partials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSizes:
    """Sizes that do not change from step to step, on one rank."""

    world_size: int
    """`N`."""
    pcp_size: int
    num_replicas: int
    """`P'`."""
    slice_size: int
    """`k`."""
    lanes: int
    """`h`."""
    query_width: int
    """`Dq`."""
    partial_width: int
    """`Do`."""
    stored_heads: int
    """`Ks`."""
    row_width: int
    """`W'`."""
    dtype: str
    row_dtype: str
    """Of these elements."""
    replicates_queries: bool = False
    """Each rank has the queries of its whole slice."""
    has_sinks: bool = False
    merge_lanes: int | None = None
    """`X`; None: a rank has one partial, whatever it holds."""

    @property
    def partial_dtype(self) -> str:
        """Partials are float32, or wider where the model computes wider."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def replica_group(self) -> GroupKind:
        """The group whose members are the PCP ranks of a DCP group, once each.

        A DCP group with slices spans the whole PCP axis; one without has PCP ranks alone.
        """
        return "pcp" if self.num_replicas == self.pcp_size else "dcp"

    @classmethod
    def of(cls, topology: Topology, tp_rank: int) -> ExchangeSizes:
        """The sizes of a rank's slice."""
        mesh, model, lanes = topology.mesh, topology.model, topology.lanes
        rows = row_format(model, topology.kv_cache_dtype)
        return cls(
            world_size=mesh.dcp_size,
            pcp_size=mesh.pcp_size,
            num_replicas=mesh.num_replicas,
            slice_size=mesh.slice_size,
            lanes=topology.heads.lanes,
            query_width=model.stored_key_width,
            partial_width=model.partial_width,
            stored_heads=topology.heads.num_stored_kv_heads(mesh.slice_of(tp_rank)),
            row_width=rows.width,
            dtype=topology.dtype,
            row_dtype=rows.element,
            replicates_queries=topology.replicates_queries,
            has_sinks=model.has_sinks,
            merge_lanes=None if lanes is None else lanes // mesh.dcp_size,
        )


def returns_candidates(sizes: ExchangeSizes, *, is_copy: bool) -> tuple[str, ...]:
    """The ways back that are worth a price; all of them are exact."""
    if sizes.merge_lanes is not None:
        return ("a2a",)
    if not is_copy or sizes.num_replicas == 1:
        return ("ag_rs", "a2a")
    return ("ag_ar", "a2a_fine", "a2a") if _is_cut(sizes) else ("ag_ar", "a2a")


def context_candidates(sizes: ExchangeSizes) -> tuple[str, ...]:
    """The ways in which distributed rows may meet context that is sharded."""
    if sizes.merge_lanes is not None:
        return ("gather_kv",)  # the one whose bits are those of a group of one, latent or not
    if sizes.replicates_queries:
        return ("gather_kv", "ring_kv", "gather_q")
    return ("gather_kv", "ring_kv", "gather_q", "pass_q")


def usable_returns(returns: str, sizes: ExchangeSizes, *, is_copy: bool) -> tuple[str, str]:
    """What an asked way back means for rows of a class, and why it is another one.

    Returns:
        The way, and a reason; the reason is empty where the way is the one asked for.
    """
    if returns != "a2a_fine" or (is_copy and sizes.num_replicas > 1 and _is_cut(sizes)):
        return returns, ""
    if not is_copy:
        return "a2a", "a2a_fine is for copied rows"
    if sizes.num_replicas == 1:
        return "a2a", "a2a_fine is for rows that several PCP ranks hold"
    return "a2a", f"a2a_fine would cut {sizes.lanes} head lanes in {sizes.num_replicas}"


def _is_cut(sizes: ExchangeSizes) -> bool:
    """The heads of a rank may be cut over the PCP ranks of its group."""
    return sizes.lanes % sizes.num_replicas == 0


def describe(plan: ClassPlan, num_rows: int, sizes: ExchangeSizes) -> Iterator[Collective]:
    """The calls of one class of rows in one layer of a sharded group.

    Args:
        plan: of the class.
        num_rows: `n`, pads included.
        sizes: of this rank.
    """
    if num_rows == 0 or plan.context in ("none", "local", "chosen"):
        return
    is_copy = plan.row_class is RowClass.COPY
    if plan.context == "gather_q":
        yield from query_gather(num_rows, sizes, is_copy=is_copy)
        yield from partials_return(
            plan.returns, num_rows, sizes, is_copy=is_copy, merge_lanes=sizes.merge_lanes
        )
    elif plan.context == "pass_q":
        yield from query_ring(num_rows, sizes)
        yield from partials_return("a2a", num_rows, sizes, is_copy=False)
    elif plan.context == "gather_kv":
        yield from key_gather(plan.chunks, sizes)
    elif plan.context == "ring_kv":
        yield from key_ring(plan.chunks, sizes)
    else:
        raise ValueError(
            f"context={plan.context!r} has no calls; gather_q, pass_q, gather_kv and ring_kv do"
        )


def query_gather(num_rows: int, sizes: ExchangeSizes, *, is_copy: bool) -> Iterator[Collective]:
    """Queries of distributed rows travel over the DCP group, those of COPY rows over the slice."""
    if sizes.replicates_queries:
        shape = (num_rows, sizes.slice_size * sizes.lanes, sizes.query_width)
        if not is_copy and sizes.num_replicas > 1:
            yield Collective("all_gather", sizes.replica_group, shape, sizes.dtype)
        return
    shape = (num_rows, sizes.lanes, sizes.query_width)
    if not is_copy:
        yield Collective("all_gather", "dcp", shape, sizes.dtype)
    elif sizes.slice_size > 1:
        yield Collective("all_gather", "slice", shape, sizes.dtype)


def query_ring(num_rows: int, sizes: ExchangeSizes) -> Iterator[Collective]:
    """Each rank's queries visit all others."""
    shape = (num_rows, sizes.lanes, sizes.query_width)
    yield from repeat(Collective("shift", "dcp", shape, sizes.dtype), sizes.world_size - 1)


def partials_return(
    returns: str,
    num_rows: int,
    sizes: ExchangeSizes,
    *,
    is_copy: bool,
    merge_lanes: int | None = None,
) -> Iterator[Collective]:
    """The way back of partial outputs and their log-sum-exps.

    Args:
        returns: one of `RETURNS`.
        num_rows: `n`, pads included.
        sizes: of this rank.
        is_copy: whether all PCP ranks hold these rows.
        merge_lanes: `X` where partials are kept apart by lane; then the way is `a2a`.
    Raises:
        ValueError: an unknown way.
    """
    rows = num_rows if is_copy else sizes.num_replicas * num_rows
    heads, width = sizes.slice_size * sizes.lanes, sizes.partial_width
    own: tuple[int, ...] = (sizes.world_size, num_rows, sizes.lanes)
    if returns == "a2a":
        if merge_lanes is not None:
            own = (sizes.world_size, merge_lanes, *own[1:])
        yield Collective("all_to_all", "dcp", (*own, width + 1), sizes.partial_dtype)
    elif returns == "a2a_fine":
        yield from _fine_return(num_rows, sizes)
    elif returns in ("ag_rs", "ag_ar"):
        yield Collective("all_gather", "dcp", (rows, heads), sizes.partial_dtype)
        if returns == "ag_rs":
            yield Collective("reduce_scatter", "dcp", (*own, width), sizes.partial_dtype)
        else:
            yield Collective("all_reduce", "dcp", (rows, heads, width), sizes.partial_dtype)
    else:
        raise ValueError(f"returns={returns!r} has no calls; those that have some: {RETURNS}")


def _fine_return(num_rows: int, sizes: ExchangeSizes) -> Iterator[Collective]:
    """To `N` fine blocks of heads, and from there to all PCP ranks; sinks need the lse there."""
    heads, width = sizes.lanes // sizes.num_replicas, sizes.partial_width
    cut = (sizes.world_size, num_rows, heads, width + 1)
    yield Collective("all_to_all", "dcp", cut, sizes.partial_dtype)
    merged = (num_rows, heads, width + int(sizes.has_sinks))
    yield Collective("all_gather", sizes.replica_group, merged, sizes.partial_dtype)


def key_gather(chunks: Sequence[ContextChunk], sizes: ExchangeSizes) -> Iterator[Collective]:
    """Cached context, one gather per chunk."""
    # A long context is cut into many chunks of one size: equal calls are one value, priced once.
    for num_rows, alike in groupby(chunk.padded_local_rows for chunk in chunks):
        shape = (num_rows, sizes.stored_heads, sizes.row_width)
        call = Collective("all_gather", "dcp", shape, sizes.row_dtype)
        yield from (call for _ in alike)


def key_ring(chunks: Sequence[ContextChunk], sizes: ExchangeSizes) -> Iterator[Collective]:
    """Cached context, each shard handed on until all ranks have met it."""
    for chunk in chunks:
        shape = (chunk.padded_local_rows, sizes.stored_heads, sizes.row_width)
        hop = Collective("shift", "dcp", shape, sizes.row_dtype)
        yield from repeat(hop, sizes.world_size - 1)


def new_rows_gather(
    new_rows: str, num_rows: int, sizes: ExchangeSizes, halo_rows: int = 0
) -> Iterator[Collective]:
    """New KV of the distributed rows: gathered over PCP in one fused call, or handed to those who
    need it.

    Args:
        new_rows: see `GroupPlan.new_rows`.
        num_rows: distributed rows of a rank, pads included.
        sizes: of this rank.
        halo_rows: `m`.
    """
    row = (sizes.stored_heads, sizes.row_width)
    if new_rows == "gather":
        yield Collective("all_gather", "pcp", (num_rows, *row), sizes.row_dtype)
    elif new_rows == "halo" and halo_rows > 0:
        yield Collective("all_to_all", "pcp", (sizes.pcp_size, halo_rows, *row), sizes.row_dtype)
