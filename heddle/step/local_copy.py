"""COPY rows of one cache group on one rank: the stored keys that each of them meets.

A step may hold hundreds of decodes of one row each, so ranges are derived for all rows at once, and
what is left to do for one row is cheap.

Legend: `Y` lanes of a merge, one per rank unless lanes were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from heddle.layout.kv import KVLayout
from heddle.layout.rows import RowClass
from heddle.step.lanes import MergeLanes
from heddle.step.localize import BoolArray, RankStep
from heddle.step.topology import Topology
from heddle.step.views import LocalRange, Ranges, RangesByRun, visible_ranges


@dataclass(frozen=True, slots=True)
class StoredView:
    """Stored keys of one sequence in one lane, and the part of them that each row meets."""

    keys: LocalRange
    ranges: Ranges
    """Relative to the first of `keys`."""
    lane: int = 0
    """Place of the lane among those of this rank."""


@dataclass(frozen=True, slots=True)
class CopyPart:
    """COPY rows [start, end) of one request: they are written first and attend once."""

    start: int
    end: int
    views: tuple[StoredView, ...]
    """Disjoint; none where this rank stores nothing that the rows see."""


class CopiedRows:
    """The COPY rows of a step in the layers of one cache group.

    Args:
        step: this rank's rows.
        topology: constants of the engine.
        group: index of the cache group.
    """

    def __init__(self, step: RankStep, topology: Topology, group: int) -> None:
        self._step = step
        self._topology = topology
        self._group = group
        self._rows = step.plan.rows
        self._lanes = MergeLanes.of(topology, group)
        self._place = topology.group_position(group, step.global_rank)
        copied = self._rows.gather[: self._rows.num_copy]
        self._start_ranks = step.rows.start_rank[copied]
        rule = topology.groups[group].visibility
        self._seen = visible_ranges(rule, step.rows.position[copied])

    def visible(self) -> BoolArray:
        """`[Y, num_copy]`: does lane y hold a key that the row sees?"""
        return self._lanes.holders(self._seen, self._start_ranks, self._layout)

    def _layout(self, start_rank: int) -> KVLayout:
        return self._topology.kv_layout(self._group, start_rank)

    def _local(self, seen: Ranges, lane: int) -> Ranges:
        return self._lanes.local(seen, self._start_ranks, self._layout, lane)

    def parts(self) -> Iterator[CopyPart]:
        """What the rows of each request meet on this rank."""
        held = [
            (number, lane, RangesByRun(self._local(seen, lane)))
            for number, lane in enumerate(self._lanes.held_by(self._place))
            for seen in self._seen
        ]
        for segment in self._rows.class_segments(self._step.pcp_rank, RowClass.COPY):
            if segment.num_rows == 0:
                continue
            request = self._step.plan.batch.requests[segment.request]
            rows = slice(segment.row, segment.row + segment.num_rows)
            views = []
            for number, lane, part in held:
                start, end, ranges = part.of(rows)
                if start < end:
                    table = request.table(self._group)
                    keys = self._lanes.keys(table, lane, start, end)
                    views.append(StoredView(keys, ranges, number))
            yield CopyPart(rows.start, rows.stop, tuple(views))
