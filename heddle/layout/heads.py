"""Which query heads a rank computes and which kv heads it stores.

Query heads are cut over TP at `floor(H * tp_rank / tp)`. The k TP ranks of a slice store the
**same** kv heads (and different positions), so kv heads are cut only `A = tp / k` ways: a slice
stores every kv head that its query heads read. Query head j reads kv head `j // (H / K)`, always
with global numbers; a ratio of local counts is wrong as soon as a cut is uneven.

    9 query, 3 kv heads, tp 2, k 1    rank 0: q 0 1 2 3    stores kv 0 1
                                      rank 1: q 4 5 6 7 8  stores kv   1 2    (kv 1 stored twice)
    the same with k 2                 both store kv 0 1 2, half of the positions each

Collectives want equal shapes, so each rank has `ceil(H / tp)` head *lanes*; a rank with fewer heads
has pad lanes, which belong to no run and are never read.

Legend: `H` query heads, `K` kv heads, `A` slices, `k` ranks of a slice. Latent attention (MLA) is
    `K = 1`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from heddle.errors import TopologyError
from heddle.layout.cut import cut


class HeadRun(NamedTuple):
    """Lanes [start, end) read kv head `kv_index`, counted from the slice's first one."""

    kv_index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """The one head map: built from model and mesh at start, asked by every path.

    Raises:
        TopologyError: kv heads do not divide query heads, a rank would have no query head, or
            slices do not tile TP.
    """

    num_query_heads: int
    num_kv_heads: int
    tp_size: int
    slice_size: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_query_heads % self.num_kv_heads:
            raise TopologyError(
                [f"{self.num_query_heads} query heads; must be a multiple of the kv heads"]
            )
        if not 1 <= self.tp_size <= self.num_query_heads:
            raise TopologyError(
                [f"tp_size={self.tp_size}; must be in [1, {self.num_query_heads}], a head per rank"]
            )
        if self.slice_size < 1 or self.tp_size % self.slice_size:
            raise TopologyError(
                [f"slice_size={self.slice_size}; must divide tp_size={self.tp_size}"]
            )

    @property
    def num_slices(self) -> int:
        """`A`: ways in which kv heads are cut."""
        return self.tp_size // self.slice_size

    @property
    def lanes(self) -> int:
        """Head lanes of every rank, pads included: `ceil(H / tp)`."""
        return -(-self.num_query_heads // self.tp_size)

    @property
    def max_stored_kv_heads(self) -> int:
        """The largest `num_stored_kv_heads` of any slice; sizes the pool."""
        return max(map(self.num_stored_kv_heads, range(self.num_slices)))

    def query_range(self, tp_rank: int) -> tuple[int, int]:
        """Global query heads [start, end) of a TP rank.

        Example:
            >>> layout = HeadLayout(num_query_heads=9, num_kv_heads=3, tp_size=2, slice_size=2)
            >>> layout.query_range(0), layout.query_range(1)
            ((0, 4), (4, 9))
        """
        self._check(tp_rank, self.tp_size, "tp_rank")
        return self._cut(tp_rank, self.tp_size)

    def kv_range(self, slice_index: int) -> tuple[int, int]:
        """Global kv heads [start, end) that every rank of a slice stores."""
        self._check(slice_index, self.num_slices, "slice_index")
        start, end = self._cut(slice_index, self.num_slices)
        return self._kv_head(start), self._kv_head(end - 1) + 1

    def num_stored_kv_heads(self, slice_index: int) -> int:
        """`Ks` of a slice."""
        start, end = self.kv_range(slice_index)
        return end - start

    def runs(self, tp_rank: int) -> tuple[HeadRun, ...]:
        """Which stored kv head each lane of one rank reads; pad lanes are in no run.

        Example:
            >>> HeadLayout(num_query_heads=9, num_kv_heads=3, tp_size=2, slice_size=2).runs(1)
            (HeadRun(kv_index=1, start=0, end=2), HeadRun(kv_index=2, start=2, end=5))
        """
        self._check(tp_rank, self.tp_size, "tp_rank")
        return _join(self._lane_map(tp_rank, first_lane=0))

    def slice_runs(self, slice_index: int) -> tuple[HeadRun, ...]:
        """Which stored kv head each gathered lane of a slice reads.

        Lane i of the slice's j-th rank stands at `j * lanes + i`. Runs of one kv head join across
        ranks unless a pad lane lies between.
        """
        self._check(slice_index, self.num_slices, "slice_index")
        first_rank = slice_index * self.slice_size
        return _join(
            pair
            for place in range(self.slice_size)
            for pair in self._lane_map(first_rank + place, first_lane=place * self.lanes)
        )

    @property
    def pad_waste(self) -> Fraction:
        """Share of head lanes that are pads: `1 - H / (tp * ceil(H / tp))`."""
        return 1 - Fraction(self.num_query_heads, self.tp_size * self.lanes)

    def kv_fraction(self, dcp_size: int) -> Fraction:
        """Largest share of a request's KV that one rank holds: `Ks / (K * dcp)`.

        Example:
            >>> layout = HeadLayout(num_query_heads=64, num_kv_heads=4, tp_size=8, slice_size=2)
            >>> layout.kv_fraction(2)
            Fraction(1, 8)
        """
        return Fraction(self.max_stored_kv_heads, self.num_kv_heads * dcp_size)

    def kv_copies(self, pcp_size: int, dcp_size: int) -> Fraction:
        """Mean number of ranks that store an element of the KV: `(tp * pcp / dcp) * mean(Ks) / K`.

        More DCP saves memory until this is 1, and none beyond.
        """
        stored = sum(map(self.num_stored_kv_heads, range(self.num_slices)))
        holders = Fraction(self.tp_size * pcp_size, dcp_size)
        return holders * Fraction(stored, self.num_slices * self.num_kv_heads)

    def _cut(self, index: int, parts: int) -> tuple[int, int]:
        """Part `index` of the query heads cut in `parts`; slice cuts are rank cuts too."""
        return cut(self.num_query_heads, parts, index)

    def _kv_head(self, query_head: int) -> int:
        return query_head // (self.num_query_heads // self.num_kv_heads)

    def _lane_map(self, tp_rank: int, first_lane: int) -> Iterable[tuple[int, int]]:
        """(lane, kv index in the slice's store) of each query head of a rank."""
        start, end = self._cut(tp_rank, self.tp_size)
        first_kv, _ = self.kv_range(tp_rank // self.slice_size)
        for head in range(start, end):
            yield first_lane + head - start, self._kv_head(head) - first_kv

    @staticmethod
    def _check(index: int, size: int, name: str) -> None:
        if not 0 <= index < size:
            raise ValueError(f"{name}={index}; must be in [0, {size})")


def _join(lane_map: Iterable[tuple[int, int]]) -> tuple[HeadRun, ...]:
    """Runs of adjacent lanes that read one kv head; `lane_map` is ascending in both."""
    runs: list[HeadRun] = []
    for lane, kv_index in lane_map:
        if runs and runs[-1].kv_index == kv_index and runs[-1].end == lane:
            runs[-1] = runs[-1]._replace(end=lane + 1)
        else:
            runs.append(HeadRun(kv_index, lane, lane + 1))
    return tuple(runs)
