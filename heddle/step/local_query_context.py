"""The cached context of distributed rows on one rank, when their queries travel.

The queries of all PCP ranks that share a sequence's keys are gathered, block after block, and each
rank answers for the keys that it stores:

    gathered queries   | n rows of PCP rank 0 | n rows of rank 1 | ...

A step may hold hundreds of decodes of one row each, so what rows see is derived for all of them at
once, and what is left to do for one request is cheap.

Legend: `n` padded rows of a class, `P'` PCP ranks of the group, `R` gathered rows with a context,
`Y` lanes of a merge, one per rank unless lanes were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from heddle.layout.kv import KVLayout
from heddle.layout.rows import RowClass, runs
from heddle.step.class_plan import ClassPlan
from heddle.step.lanes import MergeLanes
from heddle.step.local_context import QueryContextPart
from heddle.step.localize import BoolArray, RankStep
from heddle.step.topology import Topology
from heddle.step.views import Ranges, RangesByRun, visible_ranges


class TravellingRows:
    """The gathered rows of one class that have cached context, in the layers of one cache group.

    Args:
        step: this rank's rows.
        topology: constants of the engine.
        group: index of the cache group.
        row_class: WHOLE or SPLIT.
    """

    def __init__(self, step: RankStep, topology: Topology, group: int, row_class: RowClass) -> None:
        self._requests = step.plan.batch.requests
        self._topology = topology
        self._group = group
        self._lanes = MergeLanes.of(topology, group)
        self._place = topology.group_position(group, step.global_rank)
        start, end = step.plan.rows.class_rows(row_class)
        self._num_rows = end - start
        replicas = topology.mesh.num_replicas
        first_rank = step.pcp_rank // replicas * replicas
        found = [
            (segment.request, block * self._num_rows + segment.row - start, *segment[1:3])
            for block in range(replicas)
            for segment in step.plan.rows.class_segments(first_rank + block, row_class)
            if segment.num_rows and self._requests[segment.request].num_computed_tokens
        ]
        table = np.array(found, dtype=np.int64).reshape(-1, 4)
        self._runs = found
        lengths = table[:, 3] - table[:, 2]
        cached = np.array([self._requests[i].num_computed_tokens for i, *_ in found], np.int64)
        starts = np.array([self._requests[i].start_rank for i, *_ in found], np.int64)
        self.rows = runs(table[:, 1], lengths)
        """`[R]`, places among all gathered rows."""
        self._start_ranks = np.repeat(starts, lengths)
        positions = runs(cached + table[:, 2], lengths)
        limits = np.repeat(cached, lengths)
        rule = topology.groups[group].visibility
        self._seen = tuple(part.within(0, limits) for part in visible_ranges(rule, positions))

    def visible(self) -> BoolArray:
        """`[Y, P' * n]`: does lane y hold cached context that the gathered row sees?"""
        # Of this group's rows perhaps none has context, although rows of the class elsewhere do.
        total = self._topology.mesh.num_replicas * self._num_rows
        found = np.zeros((self._lanes.num_lanes, total), dtype=np.bool_)
        found[:, self.rows] = self._lanes.holders(self._seen, self._start_ranks, self._layout)
        return found

    def parts(self, plan: ClassPlan) -> Iterator[QueryContextPart]:
        """What this rank stores of the context of each request, in the pieces of the plan."""
        pieces = _pieces(plan)
        held = [
            (number, lane, [RangesByRun(self._local(seen, lane)) for seen in self._seen])
            for number, lane in enumerate(self._lanes.held_by(self._place))
        ]
        row = 0
        for request, _, first, last in self._runs:
            rows = slice(row, row + last - first)
            row = rows.stop
            for number, lane, local in held:
                for start, end, ranges in self._met(request, rows, lane, local, pieces):
                    if start < end:
                        table = self._requests[request].table(self._group)
                        keys = self._lanes.keys(table, lane, start, end)
                        yield QueryContextPart(self.rows[rows], keys, ranges, number)

    def _met(
        self,
        request: int,
        rows: slice,
        lane: int,
        local: list[RangesByRun],
        pieces: dict[int, list[tuple[int, int]]] | None,
    ) -> Iterator[tuple[int, int, Ranges]]:
        """Stored keys that the rows of a request meet at once: a hull, and ranges within it."""
        if pieces is None:
            yield from (part.of(rows) for part in local)
            return
        layout = self._lanes.layout(self._layout(self._requests[request].start_rank))
        for first, last in pieces.get(request, ()):
            for part in self._seen:
                met = part[rows].within(first, last).local(layout, lane)
                start, end = met.hull()
                yield start, end, met.clipped(start, end)

    def _layout(self, start_rank: int) -> KVLayout:
        return self._topology.kv_layout(self._group, start_rank)

    def _local(self, seen: Ranges, lane: int) -> Ranges:
        return self._lanes.local(seen, self._start_ranks, self._layout, lane)


def _pieces(plan: ClassPlan) -> dict[int, list[tuple[int, int]]] | None:
    """Positions that are met together, by request; None: all of a request at once."""
    if not plan.chunks:
        return None
    found: dict[int, list[tuple[int, int]]] = {}
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            found.setdefault(piece.request, []).append((piece.start, piece.end))
    return found
