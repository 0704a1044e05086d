"""One cache group of a step on one rank: slots, and the keys that each class of rows meets.

New KV reaches each rank once: COPY rows from its own copy, distributed rows through the exchange of
new rows. `slot_mapping` covers both, in that order.

Legend: `n` padded rows of a class, `P` PCP size, `P'` PCP ranks among those that share a sequence's
keys, `Y` lanes in which their partials merge (one per rank, unless canonical lanes were asked for),
`m` rows that one PCP rank hands to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from heddle.config.visibility import Visibility
from heddle.layout.kv import KVLayout
from heddle.layout.rows import RowClass, Segment
from heddle.step.batch import ScheduledRequest
from heddle.step.class_plan import ClassPlan, GroupPlan
from heddle.step.coverage import mix
from heddle.step.lanes import MergeLanes
from heddle.step.local_context import (
    CachedSequence,
    KeyContextBuilder,
    KeyContextChunk,
    OwnRows,
    QueryContextPart,
)
from heddle.step.local_copy import CopiedRows, CopyPart
from heddle.step.local_new_rows import new_rows_of
from heddle.step.local_query_context import TravellingRows
from heddle.step.localize import BoolArray, IntArray, RankStep
from heddle.step.slots import row_slots
from heddle.step.topology import Topology
from heddle.step.views import Ranges, visible_ranges
from heddle.units import PAD_SLOT_ID


@dataclass(frozen=True, slots=True)
class NewView:
    """New keys [start, end) of the step, and the part of them that each row meets."""

    start: int
    end: int
    ranges: Ranges


_ITSELF = Ranges(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class SelfSegment:
    """Rows [start, end) of a class on this rank: one run of a request's new rows."""

    request: int
    start: int
    end: int
    views: tuple[NewView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStep:
    """Distributed rows of one class."""

    plan: ClassPlan
    start: int
    """First local row."""
    num_rows: int
    """`n`, pads included."""
    segments: tuple[SelfSegment, ...]
    query_context: tuple[QueryContextPart, ...]
    """Queries travel: gathered queries, and this rank's share of what they see."""
    context_visible: BoolArray
    """`[Y, P' * n]`: does lane y hold cached context that the gathered row sees?"""
    key_context: tuple[KeyContextChunk, ...]
    """Keys travel, or are read in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """What the layers of one cache group do on this rank."""

    group: int
    plan: GroupPlan
    place: int
    """Of this rank among those that share a sequence's keys."""
    slot_mapping: IntArray
    """Slot on this rank, or -1: COPY rows, then the distributed rows that this rank receives."""
    coverage: int
    """Mix of the rows written here."""
    new_order: IntArray
    """Where the rows lie, among the received ones, that this rank's own rows may see; in global
    order.
    """
    new_sends: IntArray | None
    """`[P, m]`: own distributed rows that each PCP rank gets; None: all of them, or none."""
    copy_parts: tuple[CopyPart, ...]
    copy_visible: BoolArray
    """`[Y, num_copy]`: does lane y hold a key that the row sees?"""
    classes: tuple[ClassStep, ...]
    """WHOLE and SPLIT rows, where the step has some."""


def localize_group(step: RankStep, topology: Topology, group: int) -> GroupStep:
    """This rank's part of one cache group of a plan.

    Args:
        step: this rank's rows.
        topology: constants of the engine.
        group: index of the cache group.
    """
    return _GroupLocalizer(step, topology, group).run()


class _GroupLocalizer:
    """Carries what the pieces of `localize_group` share."""

    def __init__(self, step: RankStep, topology: Topology, group: int) -> None:
        self.step = step
        self.topology = topology
        self.group = group
        self.plan = step.plan.groups[group]
        self.rows = step.plan.rows
        self.rule: Visibility = topology.groups[group].visibility
        self.lanes = MergeLanes.of(topology, group)
        self.place = topology.group_position(group, step.global_rank)
        self.new_rows = new_rows_of(step, topology, self.plan)

    def run(self) -> GroupStep:
        slot_mapping, coverage = self._slots()
        copied = CopiedRows(self.step, self.topology, self.group)
        return GroupStep(
            group=self.group,
            plan=self.plan,
            place=self.place,
            slot_mapping=slot_mapping,
            coverage=coverage,
            new_order=self.new_rows.order,
            new_sends=self.new_rows.sends,
            copy_parts=tuple(copied.parts()),
            copy_visible=copied.visible(),
            classes=tuple(
                self._class_step(row_class)
                for row_class in (RowClass.WHOLE, RowClass.SPLIT)
                if self.rows.class_rows(row_class)[0] < self.rows.class_rows(row_class)[1]
            ),
        )

    def _request(self, index: int) -> tuple[ScheduledRequest, KVLayout]:
        request = self.step.plan.batch.requests[index]
        return request, self.topology.kv_layout(self.group, request.start_rank)

    def _positions(self, segment: Segment) -> IntArray:
        first = self.step.plan.batch.requests[segment.request].num_computed_tokens
        return np.arange(first + segment.start, first + segment.end, dtype=np.int64)

    # -- writes -------------------------------------------------------------------------------

    def _slots(self) -> tuple[IntArray, int]:
        """Slot of every row this rank sees, and the mix of those it stores."""
        rows, known = self.rows, self.step.rows
        global_rows = np.concatenate([rows.gather[: rows.num_copy], self.new_rows.received])
        slots = np.full(len(global_rows), PAD_SLOT_ID, dtype=np.int64)
        if rows.num_rows:
            slot_of_row = row_slots(self.step, self.topology, self.group, self.place)
            slots = np.where(global_rows >= 0, slot_of_row[global_rows], PAD_SLOT_ID)
        stored = slots != PAD_SLOT_ID
        written = global_rows[stored]
        ids = np.array([r.request_id for r in self.step.plan.batch.requests], dtype=np.int64)
        coverage = 0
        if len(written):
            coverage = mix(ids[known.request[written]], known.position[written], slots[stored])
        return slots, coverage

    # -- distributed rows ---------------------------------------------------------------------

    def _class_step(self, row_class: RowClass) -> ClassStep:
        start, end = self.rows.class_rows(row_class)
        plan = self.plan.classes[row_class]
        travelling = None
        if plan.context in ("gather_q", "pass_q"):
            travelling = TravellingRows(self.step, self.topology, self.group, row_class)
        nothing = np.zeros((self.lanes.num_lanes, 0), dtype=np.bool_)
        return ClassStep(
            plan=plan,
            start=start,
            num_rows=end - start,
            segments=tuple(self._self_segments(row_class, start)),
            query_context=() if travelling is None else tuple(travelling.parts(plan)),
            context_visible=nothing if travelling is None else travelling.visible(),
            key_context=tuple(self._key_context(plan, row_class, start)),
        )

    def _self_segments(self, row_class: RowClass, start: int) -> Iterator[SelfSegment]:
        for segment in self.rows.class_segments(self.step.pcp_rank, row_class):
            if segment.num_rows:
                yield SelfSegment(
                    segment.request,
                    segment.row - start,
                    segment.row - start + segment.num_rows,
                    tuple(self._new_views(segment)),
                )

    def _new_views(self, segment: Segment) -> Iterator[NewView]:
        """The step's own keys of the request that the rows of a segment meet."""
        request = self.step.plan.batch.requests[segment.request]
        first = request.num_computed_tokens
        base = int(self.rows.request_starts[segment.request])
        if len(request.token_ids) == 1:  # a decode row: of what is new, it sees itself
            place = self.new_rows.find(base)
            yield NewView(place, place + 1, _ITSELF)
            return
        for part in visible_ranges(self.rule, self._positions(segment)):
            fresh = part.clipped(first, first + len(request.token_ids))
            start, end = fresh.hull()
            if start < end:
                # Rows of one range are at hand in a row, whatever else is.
                place = self.new_rows.find(base + start)
                yield NewView(place, place + end - start, fresh.clipped(start, end))

    # -- context: keys travel -----------------------------------------------------------------

    def _key_context(
        self, plan: ClassPlan, row_class: RowClass, start: int
    ) -> Iterator[KeyContextChunk]:
        own: dict[int, OwnRows] = {}
        for segment in self.rows.class_segments(self.step.pcp_rank, row_class):
            row, positions = segment.row - start, self._positions(segment)
            before = own.get(segment.request)
            if before is not None:
                row, positions = before.start, np.concatenate([before.positions, positions])
            own[segment.request] = OwnRows(row, row + len(positions), positions)
        if plan.context in ("gather_q", "pass_q"):
            return
        lanes = None if self.topology.lanes is None else self.lanes
        builder = KeyContextBuilder(plan.context, self.rule, lanes, self.place, self._cached, own)
        yield from map(builder.build, plan.chunks)

    def _cached(self, index: int) -> CachedSequence:
        request, layout = self._request(index)
        table = request.table(self.group)
        return CachedSequence(table, layout, request.num_computed_tokens)
