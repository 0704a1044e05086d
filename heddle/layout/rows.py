"""Who computes a row in this step: `RowLayout`, the only place where rows are dealt to ranks.

A step packs the new rows of its requests into T global rows. Each request has one class:

    COPY    on every PCP rank; rank 0's copy is the canonical one
    WHOLE   all on one PCP rank
    SPLIT   cut at floor(q*i / 2P); rank c takes chunks c and 2P-1-c: cheap rows, dear rows

    P=2, q=8   rows 0 1 | 2 3 | 4 5 | 6 7        rank 0: 0 1 6 7     causal cost 18
               chunk  0     1     2     3        rank 1: 2 3 4 5     causal cost 18

Local rows stand in the order COPY, WHOLE, SPLIT, then request, then start. Every rank pads its
WHOLE rows and its SPLIT rows to the largest rank's count, so that each class is one slice of every
tensor and gathered tensors are `[P, M, ...]`:

    | COPY rows | WHOLE rows, pads | SPLIT rows, pads |      WHOLE and SPLIT: the distributed rows
    0        num_copy                                M

The layout is derived from global facts and is identical on every rank.

Legend: `T` packed rows, `B` requests, `P` PCP size, `M` local rows with pads, `q` new rows of one
request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class RowClass(Enum):
    """Where the rows of a request live in one step; correctness does not depend on it."""

    COPY = "copy"
    WHOLE = "whole"
    SPLIT = "split"


class RowRequest(NamedTuple):
    """One request's new rows in a step."""

    num_rows: int
    row_class: RowClass
    owner: int = 0
    """PCP rank of a WHOLE request; has no meaning for the other classes."""


class Segment(NamedTuple):
    """New rows [start, end) of request `request`, counted from the request's first new row."""

    request: int
    start: int
    end: int
    row: int
    """Local row of the first one."""

    @property
    def num_rows(self) -> int:
        """Rows of the segment; 0 for an empty early chunk."""
        return self.end - self.start


def cut_points(num_rows: int, pcp_size: int) -> tuple[int, ...]:
    """The 2P+1 cuts of a SPLIT request: `floor(q * i / 2P)`.

    Chunk sizes differ by at most 1 and the last one is never empty for q >= 1, so the last row is
    on PCP rank 0. The causal work of ranks stays nearer to equal than with ceil-sized chunks; no
    alignment to blocks is needed.

    Example:
        >>> cut_points(10, pcp_size=3)
        (0, 1, 3, 5, 6, 8, 10)
    """
    chunks = 2 * pcp_size
    return tuple(num_rows * i // chunks for i in range(chunks + 1))


def classify(num_rows: int, pcp_size: int) -> RowClass:
    """COPY below two rows per PCP rank (decode rows and tiny prompts), else SPLIT."""
    return RowClass.COPY if num_rows < 2 * pcp_size else RowClass.SPLIT


@dataclass(frozen=True, slots=True, eq=False)
class DealtSegments:
    """The segments of a step. Those of COPY requests are the same on every rank, and kept once."""

    copied: tuple[Segment, ...]
    whole: tuple[tuple[Segment, ...], ...]
    """Per rank."""
    split: tuple[tuple[Segment, ...], ...]
    """Per rank."""

    def of(self, rank: int, row_class: RowClass) -> tuple[Segment, ...]:
        """The segments of one class on a rank."""
        if row_class is RowClass.COPY:
            return self.copied
        return (self.whole if row_class is RowClass.WHOLE else self.split)[rank]


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """Index arrays of one step. Made by `create_row_layout`; arrays are read-only."""

    pcp_size: int
    num_rows: int
    """`T`: global rows."""
    num_copy: int
    """Rows that every rank computes; local rows [0, num_copy)."""
    num_whole: int
    """Local rows that follow: the largest rank's WHOLE rows."""
    num_split: int
    """Local rows that follow: the largest rank's SPLIT rows."""
    request_starts: IntArray
    """[B+1]: global row of each request's first new row, then T."""
    gather: IntArray
    """[P*M]: global row of local row j of rank c, at `c*M + j`; pads point at row 0."""
    valid: BoolArray
    """[P*M]: false on pads."""
    canon: BoolArray
    """[P*M]: true on the one canonical copy of each global row."""
    restore: IntArray
    """[T]: index into the P*M gathered rows of each global row's canonical copy."""
    distributed_order: IntArray
    """For each distributed global row, ascending: its index among the gathered distributed rows.

    Those are `P * num_distributed`, rank-major.
    """
    classes: tuple[RowClass, ...]
    """Per request."""
    dealt: DealtSegments

    @property
    def num_local_rows(self) -> int:
        """`M`: rows of every rank, pads included."""
        return self.num_copy + self.num_distributed

    @property
    def num_distributed(self) -> int:
        """Local rows [num_copy, M) of every rank."""
        return self.num_whole + self.num_split

    def class_rows(self, row_class: RowClass) -> tuple[int, int]:
        """Local rows [start, end) of a class, pads included; the same on every rank."""
        starts = {
            RowClass.COPY: (0, self.num_copy),
            RowClass.WHOLE: (self.num_copy, self.num_copy + self.num_whole),
            RowClass.SPLIT: (self.num_copy + self.num_whole, self.num_local_rows),
        }
        return starts[row_class]

    def class_segments(self, pcp_rank: int, row_class: RowClass) -> tuple[Segment, ...]:
        """The segments of one class on a rank."""
        return self.dealt.of(self._checked(pcp_rank), row_class)

    def segments(self, pcp_rank: int) -> tuple[Segment, ...]:
        """What a rank computes, in local row order.

        One segment per COPY request, one per WHOLE request on its owner, and always two per SPLIT
        request, empty or not.
        """
        rank, dealt = self._checked(pcp_rank), self.dealt
        return (*dealt.copied, *dealt.whole[rank], *dealt.split[rank])

    def local_rows(self, pcp_rank: int) -> IntArray:
        """[M]: global row of each local row of a rank; pads point at row 0."""
        start = self._checked(pcp_rank) * self.num_local_rows
        return self.gather[start : start + self.num_local_rows]

    def _checked(self, pcp_rank: int) -> int:
        if not 0 <= pcp_rank < self.pcp_size:
            raise ValueError(f"pcp_rank={pcp_rank}; must be in [0, {self.pcp_size})")
        return pcp_rank


def create_row_layout(requests: Sequence[RowRequest], pcp_size: int) -> RowLayout:
    """Deal the rows of a step to PCP ranks.

    Args:
        requests: in batch order; global rows are packed in this order.
        pcp_size: P, at least 1.
    Raises:
        ValueError: P, a row count or an owner is out of range.
    Example:
        >>> a, b = RowRequest(8, RowClass.SPLIT), RowRequest(1, RowClass.COPY)
        >>> create_row_layout([a, b], pcp_size=2).restore.tolist()
        [1, 2, 6, 7, 8, 9, 3, 4, 0]
    """
    return _create_row_layout(tuple(requests), pcp_size)


@lru_cache(maxsize=16)
def _create_row_layout(requests: tuple[RowRequest, ...], pcp_size: int) -> RowLayout:
    """A run of decode steps deals the same rows each time, and the value is frozen."""
    _check_requests(requests, pcp_size)
    counts = [request.num_rows for request in requests]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    dealt, sizes = _deal(requests, pcp_size)
    copied = _global_rows(starts, _table(dealt.copied))
    places, placed = _distributed_rows(starts, dealt, sum(sizes))

    gather = np.zeros(pcp_size * sum(sizes), dtype=np.int64)
    valid = np.zeros(pcp_size * sum(sizes), dtype=np.bool_)
    gather.reshape(pcp_size, -1)[:, : sizes[0]] = copied
    valid.reshape(pcp_size, -1)[:, : sizes[0]] = True
    gather[places], valid[places] = placed, True
    canon = valid.copy()
    canon.reshape(pcp_size, -1)[1:, : sizes[0]] = False  # COPY rows: the lowest rank's copy counts

    restore = np.empty(int(starts[-1]), dtype=np.int64)
    restore[copied], restore[placed] = np.arange(sizes[0]), places
    return RowLayout(
        pcp_size=pcp_size,
        num_rows=int(starts[-1]),
        num_copy=sizes[0],
        num_whole=sizes[1],
        num_split=sizes[2],
        request_starts=_frozen(starts),
        gather=_frozen(gather),
        valid=_frozen(valid),
        canon=_frozen(canon),
        restore=_frozen(restore),
        distributed_order=_frozen(_distributed_order(restore, placed, sum(sizes), sizes[0])),
        classes=tuple(request.row_class for request in requests),
        dealt=dealt,
    )


def _check_requests(requests: Sequence[RowRequest], pcp_size: int) -> None:
    if pcp_size < 1:
        raise ValueError(f"pcp_size={pcp_size}; must be at least 1")
    for index, request in enumerate(requests):
        if request.num_rows < 0:
            raise ValueError(f"request {index}: num_rows={request.num_rows}; must be at least 0")
        if not 0 <= request.owner < pcp_size:
            raise ValueError(f"request {index}: owner={request.owner}; must be in [0, {pcp_size})")


def _deal(
    requests: Sequence[RowRequest], pcp_size: int
) -> tuple[DealtSegments, tuple[int, int, int]]:
    """The segments of every rank, by class, then request, then start; and the rows of each class.

    One pass over the requests of a class serves all ranks: a step may hold hundreds of them.
    """
    copied: list[Segment] = []
    num_copy = _append(copied, 0, ((i, 0, r.num_rows) for i, r in _of(requests, RowClass.COPY)))
    whole: list[list[Segment]] = [[] for _ in range(pcp_size)]
    ends = [num_copy] * pcp_size
    for index, (num_rows, _, rank) in _of(requests, RowClass.WHOLE):
        whole[rank].append(Segment(index, 0, num_rows, ends[rank]))
        ends[rank] += num_rows
    first_split = max(ends)
    split: list[list[Segment]] = [[] for _ in range(pcp_size)]
    ends = [first_split] * pcp_size
    for index, request in _of(requests, RowClass.SPLIT):
        cuts = cut_points(request.num_rows, pcp_size)
        for rank in range(pcp_size):
            chunks = (rank, 2 * pcp_size - 1 - rank)  # an early one and its mirror
            parts = [(index, cuts[chunk], cuts[chunk + 1]) for chunk in chunks]
            ends[rank] = _append(split[rank], ends[rank], parts)
    dealt = DealtSegments(tuple(copied), tuple(map(tuple, whole)), tuple(map(tuple, split)))
    return dealt, (num_copy, first_split - num_copy, max(ends) - first_split)


def _of(requests: Sequence[RowRequest], row_class: RowClass) -> Iterator[tuple[int, RowRequest]]:
    return (pair for pair in enumerate(requests) if pair[1].row_class is row_class)


def _append(found: list[Segment], row: int, parts: Iterable[tuple[int, int, int]]) -> int:
    """Add (request, start, end) from local row `row` on; returns the row behind them."""
    for request, start, end in parts:
        found.append(Segment(request, start, end, row))
        row += end - start
    return row


def _table(segments: Sequence[Segment]) -> IntArray:
    """`[segments, 4]`."""
    return np.fromiter(chain.from_iterable(segments), np.int64, 4 * len(segments)).reshape(-1, 4)


def _global_rows(request_starts: IntArray, table: IntArray) -> IntArray:
    """Global rows of segments, one after another."""
    return runs(request_starts[table[:, 0]] + table[:, 1], table[:, 2] - table[:, 1])


def _distributed_rows(
    request_starts: IntArray, dealt: DealtSegments, num_local: int
) -> tuple[IntArray, IntArray]:
    """Where the WHOLE and SPLIT rows of all ranks lie, at `rank * num_local + row`, and their
    global rows.
    """
    ranks = [(*whole, *split) for whole, split in zip(dealt.whole, dealt.split, strict=True)]
    segments = [segment for rank in ranks for segment in rank]
    table = _table(segments)
    firsts = np.repeat(np.arange(len(ranks)) * num_local, [len(rank) for rank in ranks])
    places = runs(firsts + table[:, 3], table[:, 2] - table[:, 1])
    return places, _global_rows(request_starts, table)


def runs(firsts: IntArray, lengths: IntArray) -> IntArray:
    """Runs of consecutive numbers, one after another.

    Example:
        >>> runs(np.array([7, 2]), np.array([2, 3])).tolist()
        [7, 8, 2, 3, 4]
    """
    ends = np.cumsum(lengths)
    # Number i of the result lies `i - (its run's first place)` into that run.
    inside = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(ends - lengths, lengths)
    found: IntArray = np.repeat(firsts, lengths) + inside
    return found


def _distributed_order(
    restore: IntArray, distributed: IntArray, num_local: int, num_copy: int
) -> IntArray:
    """See `RowLayout.distributed_order`: canonical places, counted without COPY rows."""
    is_distributed = np.zeros(len(restore), dtype=np.bool_)
    is_distributed[distributed] = True
    places = restore[is_distributed]
    ranks = places // max(num_local, 1)
    found: IntArray = places - (ranks + 1) * num_copy
    return found


def _frozen(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """The array, read-only from here on."""
    array.flags.writeable = False
    return array
