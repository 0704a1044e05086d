"""The context part of distributed rows whose queries travel: cached keys, sharded over DCP.

    gather_q    queries are gathered and meet every shard at once, partials return
    pass_q      queries go round the group and meet one shard after another, partials return

Legend: `n` rows of a class, `h` lanes, `N` DCP ranks, `P'` PCP and `k` TP ranks among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from heddle.attention.backends.base import Visible
from heddle.attention.exchange.a2a import merge_blocks, packed
from heddle.attention.exchange.base import gather_query
from heddle.attention.exchange.lanes import merge_lanes
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.paged_rows import PagedRows, RowView
from heddle.attention.resources import AttentionResources
from heddle.attention.ring import visitors
from heddle.attention.state import AttentionState, merge
from heddle.attention.storage import SlotRange
from heddle.attention.views import attend, visible_of
from heddle.layout.heads import HeadRun
from heddle.step.local_context import QueryContextPart
from heddle.step.local_group import ClassStep
from heddle.step.localize import RankStep


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries and the keys of one range that they meet here."""

    rows: torch.Tensor
    slots: SlotRange
    visible: Visible


class TravellingContext:
    """Queries go to the keys."""

    def __init__(self, step: RankStep, rows: ClassStep, resources: AttentionResources) -> None:
        self.rows = rows
        self.resources = resources
        self.own = slice(rows.start, rows.start + rows.num_rows)
        self.visible = torch.tensor(rows.context_visible)
        self.placement = resources.placement(step, rows.num_rows, is_copy=False)
        self.lanes = range(len(self.visible) // resources.groups.dcp.world_size)
        self.visits = self._visits() if rows.plan.context in ("gather_q", "pass_q") else {}

    def _visits(self) -> dict[tuple[int | None, int], PagedRows | list[_Part]]:
        """What gathered queries meet here in each lane, or each block of them that passes."""
        num_rows = self.rows.num_rows
        passes = self.rows.plan.context == "pass_q"
        met: dict[tuple[int | None, int], list[QueryContextPart]] = defaultdict(list)
        for part in self.rows.query_context:
            block = int(part.rows[0]) // num_rows if passes else None
            rows = part.rows - (block or 0) * num_rows
            met[block, part.lane].append(replace(part, rows=rows))
        blocks = self.placement.num_replicas
        keys = (
            [(block, 0) for block in range(blocks)] if passes else [(None, n) for n in self.lanes]
        )
        total = num_rows if passes else blocks * num_rows
        return {key: self._met(met[key], total) for key in keys}

    def _met(self, parts: Sequence[QueryContextPart], num_rows: int) -> PagedRows | list[_Part]:
        views = [RowView(part.rows, part.keys, part.ranges) for part in parts]
        paged = PagedRows.of(views, num_rows, self.resources)
        return paged or [
            _Part(
                torch.tensor(part.rows),
                self.resources.store.locate(part.keys),
                visible_of(part.ranges),
            )
            for part in parts
        ]

    def run(self, layer: int, kind: AttentionKind) -> AttentionState | None:
        """State `[n, h]` over the cached context, or None when the plan says that no query
        travels.
        """
        if self.rows.plan.context == "gather_q":
            merged = self._gathered(layer, kind)
        elif self.rows.plan.context == "pass_q":
            merged = self._passed(layer, kind)
        else:
            return None
        return AttentionState(kind.finish(merged.out), merged.lse)

    def _gathered(self, layer: int, kind: AttentionKind) -> AttentionState:
        resources, dcp = self.resources, self.resources.groups.dcp
        gathered = gather_query(kind.travelling_query[self.own], self.placement, resources.groups)
        runs = resources.gathered_runs
        states = [
            self._visit(layer, kind, gathered, runs, self.visits[None, lane]) for lane in self.lanes
        ]
        if resources.topology.lanes is not None:
            return merge_lanes(states, self.visible, self.placement, dcp)
        exchange = resources.exchange(self.rows.plan.returns)
        assert exchange is not None, "queries travel in sharded groups alone"
        return exchange.merge(states[0], self.visible, self.placement, dcp)

    def _passed(self, layer: int, kind: AttentionKind) -> AttentionState:
        """One block of queries after another; each result has the block's sender as destination."""
        resources, dcp = self.resources, self.resources.groups.dcp
        blocks: list[torch.Tensor | None] = [None] * dcp.world_size
        for source, query in visitors(dcp, kind.travelling_query[self.own].contiguous()):
            visit = self.visits[source % self.placement.num_replicas, 0]
            state = self._visit(layer, kind, query, resources.runs_at(source), visit)
            blocks[source] = packed(state)
        found = torch.stack([block for block in blocks if block is not None])
        return merge_blocks(found, self.visible, self.placement, dcp)

    def _visit(
        self,
        layer: int,
        kind: AttentionKind,
        query: torch.Tensor,
        runs: Sequence[HeadRun],
        visit: PagedRows | Sequence[_Part],
    ) -> AttentionState:
        """Queries against keys of this rank; nil where it holds none."""
        if isinstance(visit, PagedRows):
            return visit.attend(layer, kind, query, runs)
        width = kind.stored(kind.rows)[1].shape[-1]
        state = AttentionState.nil((*query.shape[:2], width), dtype=self.resources.partial_dtype)
        for part in visit:
            rows = part.rows
            keys = kind.stored(self.resources.store.keys(layer, part.slots, query.dtype))
            found = attend(
                self.resources.backend, kind, query.index_select(0, rows), keys, runs, part.visible
            )
            # Rows may come twice: with their window, and with the first tokens.
            before = AttentionState(
                state.out.index_select(0, rows), state.lse.index_select(0, rows)
            )
            found = merge([before, found], strict=False)
            state.out.index_copy_(0, rows, found.out)
            state.lse.index_copy_(0, rows, found.lse)
        return state
