"""From a batch and its rows to the choices of every cache group: as asked, or the cheapest.

With canonical lanes every context is met in the same pieces, whatever the number of ranks.

Legend: `C` cached tokens of a request, `N` ranks that share a sequence's keys, `m` rows that one
PCP rank hands to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from heddle.layout.rows import RowClass, RowLayout
from heddle.step.batch import GlobalBatch
from heddle.step.class_plan import ClassPlan, GroupPlan
from heddle.step.context import (
    ContextChunk,
    ContextSpans,
    largest_share,
    measure_context_chunks,
    plan_context_chunks,
)
from heddle.step.exchanges import (
    ExchangeSizes,
    context_candidates,
    returns_candidates,
    usable_returns,
)
from heddle.step.lanes import MergeLanes
from heddle.step.new_rows import worthwhile_halo
from heddle.step.pricing import ContextWork, choose_plan
from heddle.step.topology import Topology

IntArray = npt.NDArray[np.int64]
_UNBOUNDED = 1 << 62


def plan_groups(batch: GlobalBatch, rows: RowLayout, topology: Topology) -> tuple[GroupPlan, ...]:
    """The plan of every cache group; groups of one rule and size are planned alike."""
    facts = _facts(batch)
    return tuple(
        _GroupPlanner(batch, rows, topology, group, facts).run()
        for group in range(len(topology.groups))
    )


def _facts(batch: GlobalBatch) -> IntArray:
    """`[3, B]`: new rows, cached tokens and start rank of each request."""
    counts = [len(request.token_ids) for request in batch.requests]
    cached = [request.num_computed_tokens for request in batch.requests]
    return np.array([counts, cached, [r.start_rank for r in batch.requests]], dtype=np.int64)


class _GroupPlanner:
    """Carries what the choices of one group share."""

    def __init__(
        self,
        batch: GlobalBatch,
        rows: RowLayout,
        topology: Topology,
        group: int,
        facts: IntArray,
    ) -> None:
        self.batch = batch
        self.rows = rows
        self.topology = topology
        self.group = group
        self.facts = facts
        self.visibility = topology.groups[group].visibility
        self.is_sharded = topology.groups[group].world_size > 1
        self.sizes = ExchangeSizes.of(topology, tp_rank=0)
        self.merge_lanes = MergeLanes.of(topology, group)

    def run(self) -> GroupPlan:
        plan = GroupPlan(
            classes={
                RowClass.COPY: self._copy(),
                RowClass.WHOLE: self._distributed(RowClass.WHOLE),
                RowClass.SPLIT: self._distributed(RowClass.SPLIT),
            },
            new_rows=self._plain_new_rows(),
        )
        return self._with_halo(plan) if plan.new_rows == "gather" else plan

    def _plain_new_rows(self) -> str:
        """The way of new rows to their readers when each may be seen anywhere."""
        if self.rows.num_distributed == 0:
            return "none"
        return "own" if self.topology.mesh.pcp_size == 1 else "gather"

    def _with_halo(self, plan: GroupPlan) -> GroupPlan:
        """The same plan with a halo instead of a gather, where that moves fewer rows."""
        found = worthwhile_halo(self.batch, self.rows, self.topology, self.group)
        if found is None:
            return plan
        halo, size = found
        reason = f"new rows: halo, {size} of {self.rows.num_distributed} rows a rank"
        return replace(plan, new_rows="halo", halo=halo, halo_rows=size, new_rows_reason=reason)

    def _copy(self) -> ClassPlan:
        if self.rows.num_copy == 0:
            return ClassPlan(row_class=RowClass.COPY)
        if not self.is_sharded:
            return ClassPlan(row_class=RowClass.COPY, context="local")
        returns, why = self._returns(is_copy=True)
        plans = [
            ClassPlan(row_class=RowClass.COPY, context="gather_q", returns=way) for way in returns
        ]
        return self._chosen(plans, self.rows.num_copy, why)

    def _returns(self, *, is_copy: bool) -> tuple[tuple[str, ...], str]:
        """The ways back to choose from, and why not the one that was asked for."""
        asked = self.topology.return_exchange
        if asked == "auto":
            return returns_candidates(self.sizes, is_copy=is_copy), ""
        returns, why = usable_returns(asked, self.sizes, is_copy=is_copy)
        return (returns,), why

    def _chosen(
        self,
        plans: Sequence[ClassPlan],
        num_rows: int,
        why: str = "",
        work: ContextWork | None = None,
    ) -> ClassPlan:
        """The cheapest plan, with its reason."""
        best, price = choose_plan(plans, num_rows, self.sizes, self.topology, work)
        how = f"the cheapest of {len(plans)}: " if len(plans) > 1 else "as asked: "
        if why:
            how = f"since {why}: "
        reason = f"{best.row_class.value} rows: {how}{price}"
        return replace(best, reason=reason)

    def _distributed(self, row_class: RowClass) -> ClassPlan:
        if self.topology.model.sparse is not None:
            return self._chosen_keys(row_class)
        spans = self._spans(row_class)
        if not len(spans):
            return ClassPlan(row_class=row_class)
        if not self.is_sharded:
            return ClassPlan(
                row_class=row_class, context="local", chunks=self._chunks(spans, "local")
            )
        plans, why = [], ""
        contexts = self._contexts()
        is_open = len(contexts) > 1
        for context in contexts:
            returns: tuple[str, ...] = ("none",)
            if context == "gather_q":
                returns, why = self._returns(is_copy=False)
            elif context == "pass_q":
                returns = ("a2a",)  # blocks are met one by one, each with its own destination
            chunks = self._chunks(spans, context, with_pieces=not is_open)
            plans += [
                ClassPlan(row_class=row_class, context=context, returns=way, chunks=chunks)
                for way in returns
            ]
        start, end = self.rows.class_rows(row_class)
        work = ContextWork.of(spans, self.facts[0], self.topology.mesh.pcp_size)
        best = self._chosen(plans, end - start, why if len(plans) == 1 else "", work)
        return replace(best, chunks=self._chunks(spans, best.context)) if is_open else best

    def _chosen_keys(self, row_class: RowClass) -> ClassPlan:
        """Sparse layers: rows meet chosen keys, new or cached, so all distributed rows go alike."""
        start, end = self.rows.class_rows(row_class)
        if start == end or not self.is_sharded:
            return ClassPlan(row_class=row_class, context="none" if start == end else "chosen")
        returns, why = self._returns(is_copy=False)
        plans = [ClassPlan(row_class=row_class, context="gather_q", returns=way) for way in returns]
        best = self._chosen(plans, self.rows.num_distributed, why)
        return replace(best, context="chosen")

    def _contexts(self) -> tuple[str, ...]:
        """The ways to meet cached context that may be chosen from."""
        asked = self.topology.context_exchange
        return context_candidates(self.sizes) if asked == "auto" else (asked,)

    def _spans(self, row_class: RowClass) -> ContextSpans:
        """The cached keys that some row of each request of the class sees."""
        classes = self.rows.classes
        members = np.array([i for i, found in enumerate(classes) if found is row_class], np.int64)
        counts, cached, starts = self.facts[:, members]
        is_there = (counts > 0) & (cached > 0)
        members, counts, cached, starts = (
            column[is_there] for column in (members, counts, cached, starts)
        )
        layout = self.merge_lanes.layout(self.topology.kv_layout(self.group))
        if not self.is_sharded:
            starts = np.zeros_like(starts)  # every rank holds the whole chain
        if self.visibility.is_full:
            return ContextSpans(layout, members, np.zeros_like(cached), cached, starts)
        start = np.minimum(self.visibility.start(cached), cached)
        # Rows further on see less of the window and as much of the first tokens.
        first_end = np.minimum(self.visibility.first_end(cached + counts - 1), cached)
        touches = first_end >= start // layout.round_size * layout.round_size
        start = np.where(touches & (first_end > 0), 0, start)
        first_end = np.where(touches, 0, first_end)
        zeros = np.zeros_like(start)
        both = np.array(
            [[members, zeros, first_end, starts], [members, start, cached, starts]]
        )  # [2, 4, S]
        columns = both.transpose(1, 2, 0).reshape(4, -1)  # the first tokens in front of the window
        return ContextSpans(layout, *columns[:, columns[1] < columns[2]])

    def _chunks(
        self, spans: ContextSpans, context: str, *, with_pieces: bool = True
    ) -> tuple[ContextChunk, ...]:
        """Parts of context, where keys travel or are read in place; a price needs no pieces."""
        workspace = self.topology.context_workspace_tokens
        if self.topology.lanes is not None:
            # Cut as if there were a rank per lane: for any number of ranks alike.
            return tuple(self._padded(chunk) for chunk in plan_context_chunks(spans, workspace))
        if context in ("gather_q", "pass_q"):
            return ()
        if context == "ring_kv" or (context == "local" and not self.topology.model.is_mla):
            # Read in place, or whole shards travel: nothing is gathered, so nothing is bounded.
            workspace = _UNBOUNDED
        cut = plan_context_chunks if with_pieces else measure_context_chunks
        return cut(spans, workspace)

    def _padded(self, chunk: ContextChunk) -> ContextChunk:
        """A chunk that was cut for lanes, with the largest share of a rank."""
        layouts = [self.topology.kv_layout(self.group)] * len(chunk.pieces)
        return chunk._replace(padded_local_rows=largest_share(chunk.pieces, layouts))
