"""The context part of distributed rows whose queries travel: cached keys, sharded over DCP.

    gather_q    queries are gathered and meet every shard at once, partials return
    pass_q      queries go round the group and meet one shard after another, partials return

Legend: `n` rows of a class, `h` lanes, `N` DCP ranks, `P'` PCP and `k` TP ranks among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heddle.attention.backends.base import Visible
from heddle.attention.exchange.a2a import merge_blocks, packed
from heddle.attention.exchange.base import gather_query
from heddle.attention.exchange.lanes import merge_lanes
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.resources import AttentionResources
from heddle.attention.ring import visitors
from heddle.attention.state import AttentionState, merge
from heddle.attention.storage import SlotRange
from heddle.attention.views import attend, visible_of
from heddle.layout.heads import HeadRun
from heddle.step.local_group import ClassStep
from heddle.step.localize import RankStep


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries and the keys of one range that they meet here."""

    lane: int
    block: int
    """Row block of the queries."""
    rows: torch.Tensor
    """Among all gathered queries."""
    slots: SlotRange
    visible: Visible


class TravellingContext:
    """Queries go to the keys."""

    def __init__(self, step: RankStep, rows: ClassStep, resources: AttentionResources) -> None:
        self.rows = rows
        self.resources = resources
        self.own = slice(rows.start, rows.start + rows.num_rows)
        self.parts = [
            _Part(
                part.lane,
                int(part.rows[0]) // rows.num_rows,
                torch.tensor(part.rows),
                resources.store.locate(part.keys),
                visible_of(part.ranges),
            )
            for part in rows.query_context
        ]
        self.visible = torch.tensor(rows.context_visible)
        self.placement = resources.placement(step, rows.num_rows, is_copy=False)

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
        runs, rows = resources.gathered_runs, [part.rows for part in self.parts]
        if resources.topology.lanes is None:
            local = self._visit(
                layer, kind, gathered, runs, list(zip(self.parts, rows, strict=True))
            )
            exchange = resources.exchange(self.rows.plan.returns)
            assert exchange is not None, "queries travel in sharded groups alone"
            return exchange.merge(local, self.visible, self.placement, dcp)
        states = [
            self._visit(
                layer,
                kind,
                gathered,
                runs,
                [pair for pair in zip(self.parts, rows, strict=True) if pair[0].lane == lane],
            )
            for lane in range(len(self.visible) // dcp.world_size)
        ]
        return merge_lanes(states, self.visible, self.placement, dcp)

    def _passed(self, layer: int, kind: AttentionKind) -> AttentionState:
        """One block of queries after another; each result has the block's sender as destination."""
        resources, dcp = self.resources, self.resources.groups.dcp
        blocks: list[torch.Tensor | None] = [None] * dcp.world_size
        for source, query in visitors(dcp, kind.travelling_query[self.own].contiguous()):
            block = source % self.placement.num_replicas
            first = block * self.rows.num_rows
            parts = [(part, part.rows - first) for part in self.parts if part.block == block]
            state = self._visit(layer, kind, query, resources.runs_at(source), parts)
            blocks[source] = packed(state)
        found = torch.stack([block for block in blocks if block is not None])
        return merge_blocks(found, self.visible, self.placement, dcp)

    def _visit(
        self,
        layer: int,
        kind: AttentionKind,
        query: torch.Tensor,
        runs: Sequence[HeadRun],
        parts: Sequence[tuple[_Part, torch.Tensor]],
    ) -> AttentionState:
        """Queries against keys of this rank, by parts and their rows; nil where it holds none."""
        width = kind.stored(kind.rows)[1].shape[-1]
        state = AttentionState.nil((*query.shape[:2], width), dtype=self.resources.partial_dtype)
        for part, rows in parts:
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
