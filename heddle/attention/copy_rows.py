"""COPY rows: every PCP rank holds them. New KV is written first, then each row attends once.

A row meets a range of local keys on each rank, which its position alone decides, so decode rows,
short prompts, drafts and windows are one case.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from heddle.attention.backends.base import Visible
from heddle.attention.exchange.base import gather_query
from heddle.attention.exchange.lanes import merge_lanes
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.paged_rows import PagedRows, RowView
from heddle.attention.resources import AttentionResources
from heddle.attention.state import AttentionState, concatenate, with_sinks
from heddle.attention.storage import SlotRange
from heddle.attention.views import attend, joined, visible_of
from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.kernels.recording.inputs import Input
from heddle.layout.heads import HeadRun
from heddle.layout.rows import RowClass
from heddle.step.lanes import MergeLanes
from heddle.step.local_copy import CopyPart
from heddle.step.local_group import GroupStep
from heddle.step.localize import RankStep

_Views = list[tuple[SlotRange, Visible]]


class CopyRows:
    """Attention of the COPY rows of one step in the layers of one cache group.

    Args:
        step: this rank's rows.
        group: what they do in these layers.
        resources: of the rank.
        num_tables: block tables of a plan at least, see `paged_plans`.
    """

    def __init__(
        self,
        step: RankStep,
        group: GroupStep,
        resources: AttentionResources,
        num_tables: int = 1,
    ) -> None:
        plan = group.plan.classes[RowClass.COPY]
        self.num_rows = step.num_copy
        self.resources = resources
        self.lanes = range(MergeLanes.of(resources.topology, group.group).per_place)
        self.paged = self._paged(group.copy_parts, num_tables)
        self.parts = (
            []
            if self.paged is not None
            else [
                (slice(part.start, part.end), [self._views(part, lane) for lane in self.lanes])
                for part in group.copy_parts
            ]
        )
        self.visible = torch.tensor(group.copy_visible)
        self.is_sharded = plan.context == "gather_q"
        self.placement = (
            resources.placement(step, step.num_copy, is_copy=True)
            if self.is_sharded
            else resources.local_placement(step.num_copy)
        )
        self.exchange = resources.exchange(plan.returns)

    def _paged(self, parts: Sequence[CopyPart], num_tables: int) -> list[PagedRows] | None:
        """Per lane; None where rows are met request by request."""
        found = []
        for lane in self.lanes:
            views = [
                RowView(slice(part.start, part.end), view.keys, view.ranges)
                for part in parts
                for view in part.views
                if view.lane == lane
            ]
            paged = PagedRows.of(views, self.num_rows, self.resources, num_tables)
            if paged is None:
                return None
            found.append(paged)
        return found

    @property
    def inputs(self) -> list[Input]:
        """What differs between steps of equal looks."""
        plans = [plan for paged in self.paged or () for plan in paged.plans]
        return [self.visible, *plans]

    @property
    def looks(self) -> tuple[Hashable, ...] | None:
        """Steps of equal looks do the same to these rows; None: this one is like no other."""
        if self.paged is None:
            return None
        # How many sequences there are decides which kernel meets them.
        plans = tuple(tuple(len(plan.block_tables) for plan in rows.plans) for rows in self.paged)
        exchange = None if self.exchange is None else self.exchange.name
        return self.num_rows, self.is_sharded, exchange, plans

    def _views(self, part: CopyPart, lane: int) -> _Views:
        locate = self.resources.store.locate
        return [
            (locate(view.keys), visible_of(view.ranges)) for view in part.views if view.lane == lane
        ]

    def run(self, layer: int, kind: AttentionKind) -> torch.Tensor:
        """`[num_copy, h, Dv]`."""
        query = kind.travelling_query[: self.num_rows]
        merged = self._merged(layer, kind, query)
        if kind.sinks is not None:
            merged = with_sinks(merged, kind.sinks)
        return kind.finish(merged.out)

    def _merged(self, layer: int, kind: AttentionKind, query: torch.Tensor) -> AttentionState:
        """The state of this rank's heads over the keys of all ranks."""
        resources, dcp = self.resources, self._dcp
        if self.is_sharded:
            query, runs = (
                gather_query(query, self.placement, resources.groups),
                resources.gathered_runs,
            )
        else:
            query, runs = query[:, resources.own_lanes], resources.own_runs
        states = [self._attend(layer, kind, query, runs, lane) for lane in self.lanes]
        if resources.topology.lanes is not None:
            return merge_lanes(states, self.visible, self.placement, dcp)
        if self.exchange is None:
            return states[0]
        return self.exchange.merge(states[0], self.visible, self.placement, dcp)

    @property
    def _dcp(self) -> Communicator:
        """Those that share a sequence's keys."""
        return self.resources.groups.dcp if self.is_sharded else SoloCommunicator()

    def _attend(
        self,
        layer: int,
        kind: AttentionKind,
        query: torch.Tensor,
        runs: Sequence[HeadRun],
        lane: int,
    ) -> AttentionState:
        """Each request's rows against its own local keys of a lane."""
        if self.paged is not None:
            return self.paged[lane].attend(layer, kind, query, runs)
        states = []
        for rows, lanes in self.parts:
            found = []
            for slots, visible in lanes[lane]:
                keys = kind.stored(self.resources.store.keys(layer, slots, query.dtype))
                found.append(attend(self.resources.backend, kind, query[rows], keys, runs, visible))
            states.append(joined(found) if found else self._nil(kind, query[rows]))
        return concatenate(states)

    def _nil(self, kind: AttentionKind, query: torch.Tensor) -> AttentionState:
        """Rows that meet nothing here."""
        width = kind.stored(kind.rows)[1].shape[-1]
        return AttentionState.nil((*query.shape[:2], width), dtype=self.resources.partial_dtype)
