"""Which stored keys are merged as one part: all of a rank, or canonical lanes.

A merge of N parts has other bits than one of M parts. Canonical lanes fix the parts, whatever the
number of ranks: `Y` lanes, of which each rank holds `X = Y / N` and computes each one apart.

    lane(t) = (t // I) mod Y            Y = 4, I = 2, N = 2

    t         0 1 | 2 3 | 4 5 | 6 7 || 8 9 | ...
    lane       0  |  1  |  2  |  3  ||  0  |
    rank       0  |  1  |  0  |  1  ||  0  |         rank r holds lanes r, r + N, r + 2 N, ...
    on rank   0 1 | 0 1 | 2 3 | 2 3 || 4 5 |         local indices

A lane is what a rank of a group of `Y` would hold, so `KVLayout` answers for it too. Without
canonical lanes every rank is one lane.

Legend: `N` ranks that share a sequence's keys, `Y` lanes, `X` lanes of one rank, `I` interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle.layout.kv import KVLayout
from heddle.step.topology import Topology
from heddle.step.views import LocalRange, Ranges

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
LayoutOf = Callable[[int], KVLayout]


@dataclass(frozen=True, slots=True)
class MergeLanes:
    """The lanes of one cache group."""

    num_lanes: int
    """`Y`, a multiple of `N`."""
    num_places: int
    """`N`."""
    interleave_size: int
    """`I`."""

    @classmethod
    def of(cls, topology: Topology, group: int) -> MergeLanes:
        """The lanes of a group: those asked for, or one per rank."""
        places = topology.groups[group].world_size
        return cls(topology.lanes or places, places, topology.interleave_size)

    @property
    def per_place(self) -> int:
        """`X`."""
        return self.num_lanes // self.num_places

    def held_by(self, place: int) -> range:
        """Lanes of one rank, ascending."""
        return range(place, self.num_lanes, self.num_places)

    def layout(self, layout: KVLayout) -> KVLayout:
        """Ownership of positions by lanes, given the one by ranks.

        Chains start at lane 0: with canonical lanes no chain starts at another rank.
        """
        if self.num_lanes == layout.world_size:
            return layout
        return KVLayout(self.num_lanes, layout.interleave_size, layout.block_size)

    def local(
        self, ranges: Ranges, start_ranks: IntArray, layout_of: LayoutOf, lane: int
    ) -> Ranges:
        """Ranges of positions as ranges of what a lane holds.

        Args:
            ranges: of rows, `[R]`.
            start_ranks: `[R]`, `u` of each row's chain.
            layout_of: ownership by ranks, by start rank.
            lane: which lane.
        """
        found = Ranges(np.empty_like(ranges.first), np.empty_like(ranges.end))
        for start_rank in np.unique(start_ranks).tolist():
            layout, rows = self.layout(layout_of(start_rank)), start_ranks == start_rank
            if rows.all():
                return ranges.local(layout, lane)
            part = Ranges(ranges.first[rows], ranges.end[rows]).local(layout, lane)
            found.first[rows], found.end[rows] = part.first, part.end
        return found

    def holders(
        self, ranges: Sequence[Ranges], start_ranks: IntArray, layout_of: LayoutOf
    ) -> BoolArray:
        """`[Y, R]`: does a lane hold any key that a row sees? Arguments as for `local`."""
        found = np.zeros((self.num_lanes, len(start_ranks)), dtype=np.bool_)
        for start_rank in np.unique(start_ranks).tolist():
            layout, rows = self.layout(layout_of(start_rank)), start_ranks == start_rank
            for part in ranges:
                found[:, rows] |= layout.holders(part.first[rows], part.end[rows])
        return found

    def keys(self, block_table: IntArray, lane: int, start: int, end: int) -> LocalRange:
        """Keys [start, end) of a lane of this rank, as rows that the rank stores; start < end."""
        if self.per_place == 1:
            return LocalRange(block_table, start, end)
        local = self.local_index(np.arange(start, end, dtype=np.int64), lane)
        return LocalRange(block_table, int(local[0]), int(local[-1]) + 1, local - local[0])

    def local_index(self, index: IntArray, lane: int) -> IntArray:
        """Index among the keys of a lane -> index among those of the rank that holds it.

        Example:
            >>> MergeLanes(4, 2, 2).local_index(np.arange(4), lane=2).tolist()
            [2, 3, 6, 7]
        """
        run, place = index // self.interleave_size, index % self.interleave_size
        runs = lane // self.num_places + self.per_place * run
        local: IntArray = runs * self.interleave_size + place
        return local
