"""New KV of distributed rows on its way to those who need it, over the PCP ranks.

A rank needs a new row of another one if it stores it, or if its own rows see it. Where every row
sees everything before it, that is nearly all rows, and they are gathered. Under a window it is the
halo before each of its segments, and its share of what is stored:

    rank 1 of 4, window 3     0 0 0 1 1 1 2 2 2 3 3 3 | 3 3 3 2 2 2 1 1 1 0 0 0
                                  ^ ^                             ^ ^
Each pair of ranks exchanges equally many rows, so one all-to-all of the largest count moves them.

Legend: `P` PCP ranks, `T` new rows of the step, `n` distributed rows of a rank, `m` rows that one
rank hands to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle.layout.rows import RowClass, RowLayout, Segment
from heddle.step.batch import GlobalBatch
from heddle.step.topology import Topology
from heddle.step.views import visible_ranges

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Halo:
    """Who needs which distributed rows in one cache group; the same on all ranks."""

    home: IntArray
    """`[T]`: PCP rank that computes a row; -1 for COPY rows."""
    place: IntArray
    """`[T]`: its row among the distributed rows there."""
    owner: IntArray
    """`[T]`: who stores it, among those that share its sequence's keys."""
    seen: BoolArray
    """`[P, T]`: do rows of a PCP rank see it?"""

    @classmethod
    def of(cls, batch: GlobalBatch, rows: RowLayout, topology: Topology, group: int) -> Halo:
        """Derive from global facts."""
        per_rank = (rows.pcp_size, rows.num_local_rows)
        valid = rows.valid.reshape(per_rank)[:, rows.num_copy :]
        gather = rows.gather.reshape(per_rank)[:, rows.num_copy :]
        home = np.full(rows.num_rows, -1, dtype=np.int64)
        place = np.zeros(rows.num_rows, dtype=np.int64)
        home[gather[valid]], place[gather[valid]] = np.nonzero(valid)
        owner = np.full(rows.num_rows, -1, dtype=np.int64)
        for index, request in enumerate(batch.requests):
            start, end = int(rows.request_starts[index]), int(rows.request_starts[index + 1])
            positions = request.num_computed_tokens + np.arange(end - start, dtype=np.int64)
            owner[start:end] = topology.kv_layout(group, request.start_rank).owner(positions)
        return cls(home, place, owner, _seen_rows(batch, rows, topology, group))

    def wanted(self, pcp_rank: int, place: int) -> BoolArray:
        """`[T]`: distributed rows that a rank stores or sees.

        Args:
            pcp_rank: of the rank.
            place: of it among those that share a sequence's keys.
        """
        found: BoolArray = (self.home >= 0) & ((self.owner == place) | self.seen[pcp_rank])
        return found

    def handed_over(self, source: int, target: int, place: int) -> IntArray:
        """Global rows that PCP rank `source` hands to `target`, whose place is `place`."""
        return np.flatnonzero(self.wanted(target, place) & (self.home == source))

    def largest(self, topology: Topology) -> int:
        """`m`: most rows that any rank hands to any other one."""
        mesh, most = topology.mesh, 0
        for tp_rank in range(mesh.slice_size):
            for target in range(mesh.pcp_size):
                wanted = self.wanted(target, place_of(topology, target, tp_rank))
                counts = np.bincount(self.home[wanted], minlength=mesh.pcp_size)
                counts[target] = 0
                most = max(most, int(counts.max()))
        return most


def place_of(topology: Topology, pcp_rank: int, tp_rank: int) -> int:
    """Place in its DCP group of the rank with these coordinates."""
    mesh = topology.mesh
    return (tp_rank * mesh.pcp_size + pcp_rank) % mesh.dcp_size


def worthwhile_halo(
    batch: GlobalBatch, rows: RowLayout, topology: Topology, group: int
) -> tuple[Halo, int] | None:
    """Who needs which rows, and `m`, where handing those over moves less than a gather."""
    cache_group = topology.groups[group]
    if cache_group.visibility.is_full or cache_group.world_size == 1:
        return None  # the last rows see everything, or every rank stores it
    halo = Halo.of(batch, rows, topology, group)
    size = halo.largest(topology)
    return (halo, size) if size < rows.num_distributed else None


def _seen_rows(batch: GlobalBatch, rows: RowLayout, topology: Topology, group: int) -> BoolArray:
    seen = np.zeros((rows.pcp_size, rows.num_rows), dtype=np.bool_)
    for pcp_rank in range(rows.pcp_size):
        for segment in rows.segments(pcp_rank):
            if rows.classes[segment.request] is RowClass.COPY or segment.num_rows == 0:
                continue
            for start, end in _spans(segment, batch, rows, topology, group):
                seen[pcp_rank, start:end] = True
    return seen


def _spans(
    segment: Segment, batch: GlobalBatch, rows: RowLayout, topology: Topology, group: int
) -> Iterator[tuple[int, int]]:
    """New rows of the request that the rows of a segment see, as ranges of global rows."""
    request = batch.requests[segment.request]
    first, base = request.num_computed_tokens, int(rows.request_starts[segment.request])
    positions = np.arange(first + segment.start, first + segment.end, dtype=np.int64)
    for part in visible_ranges(topology.groups[group].visibility, positions):
        start, end = part.clipped(first, first + len(request.token_ids)).hull()
        yield base + start, base + end
