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

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
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


@dataclass(frozen=True, slots=True)
class RowRequest:
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
    rank_segments: tuple[tuple[Segment, ...], ...]

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
        return tuple(
            segment
            for segment in self.segments(pcp_rank)
            if self.classes[segment.request] is row_class
        )

    def segments(self, pcp_rank: int) -> tuple[Segment, ...]:
        """What a rank computes, in local row order.

        One segment per COPY request, one per WHOLE request on its owner, and always two per SPLIT
        request, empty or not.
        """
        return self.rank_segments[self._checked(pcp_rank)]

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
    _check_requests(requests, pcp_size)
    counts = [request.num_rows for request in requests]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    sizes = _class_sizes(requests, pcp_size)
    num_local = sum(sizes)
    segments = tuple(_rank_segments(requests, rank, pcp_size, sizes) for rank in range(pcp_size))

    gather = np.zeros((pcp_size, num_local), dtype=np.int64)
    valid = np.zeros((pcp_size, num_local), dtype=np.bool_)
    for rank, rank_part in enumerate(segments):
        local, rows = _expand(starts, rank_part)
        gather[rank, local] = rows
        valid[rank, local] = True
    canon = valid.copy()
    canon[1:, : sizes[0]] = False  # COPY rows: the lowest rank's copy is the canonical one

    restore = np.empty(int(starts[-1]), dtype=np.int64)
    restore[gather[canon]] = np.flatnonzero(canon)
    part = valid[:, sizes[0] :]
    order = np.argsort(gather[:, sizes[0] :][part])  # no ties: a distributed row is on one rank
    return RowLayout(
        pcp_size=pcp_size,
        num_rows=int(starts[-1]),
        num_copy=sizes[0],
        num_whole=sizes[1],
        num_split=sizes[2],
        request_starts=_frozen(starts),
        gather=_frozen(gather.ravel()),
        valid=_frozen(valid.ravel()),
        canon=_frozen(canon.ravel()),
        restore=_frozen(restore),
        distributed_order=_frozen(np.flatnonzero(part)[order]),
        classes=tuple(request.row_class for request in requests),
        rank_segments=segments,
    )


def _check_requests(requests: Sequence[RowRequest], pcp_size: int) -> None:
    if pcp_size < 1:
        raise ValueError(f"pcp_size={pcp_size}; must be at least 1")
    for index, request in enumerate(requests):
        if request.num_rows < 0:
            raise ValueError(f"request {index}: num_rows={request.num_rows}; must be at least 0")
        if not 0 <= request.owner < pcp_size:
            raise ValueError(f"request {index}: owner={request.owner}; must be in [0, {pcp_size})")


def _class_sizes(requests: Sequence[RowRequest], pcp_size: int) -> tuple[int, int, int]:
    """Local rows of each class on every rank: COPY, WHOLE, SPLIT."""
    copied = 0
    whole = np.zeros(pcp_size, dtype=np.int64)
    split = np.zeros(pcp_size, dtype=np.int64)
    for request in requests:
        if request.row_class is RowClass.COPY:
            copied += request.num_rows
        elif request.row_class is RowClass.WHOLE:
            whole[request.owner] += request.num_rows
        else:
            cuts = np.diff(cut_points(request.num_rows, pcp_size))
            split += cuts[:pcp_size] + cuts[pcp_size:][::-1]
    return copied, int(whole.max()), int(split.max())


def _rank_segments(
    requests: Sequence[RowRequest], pcp_rank: int, pcp_size: int, sizes: tuple[int, int, int]
) -> tuple[Segment, ...]:
    """One rank's segments in local row order: class, then request, then start."""
    found: dict[RowClass, list[Segment]] = {row_class: [] for row_class in RowClass}
    copies, wholes, _ = sizes
    rows = {RowClass.COPY: 0, RowClass.WHOLE: copies, RowClass.SPLIT: copies + wholes}

    def place(index: int, row_class: RowClass, start: int, end: int) -> None:
        found[row_class].append(Segment(index, start, end, rows[row_class]))
        rows[row_class] += end - start

    for index, request in enumerate(requests):
        if request.row_class is RowClass.SPLIT:
            cuts = cut_points(request.num_rows, pcp_size)
            for chunk in (pcp_rank, 2 * pcp_size - 1 - pcp_rank):  # an early one and its mirror
                place(index, RowClass.SPLIT, cuts[chunk], cuts[chunk + 1])
        elif request.row_class is RowClass.COPY or request.owner == pcp_rank:
            place(index, request.row_class, 0, request.num_rows)
    return tuple(segment for row_class in RowClass for segment in found[row_class])


def _expand(request_starts: IntArray, segments: Sequence[Segment]) -> tuple[IntArray, IntArray]:
    """Local and global rows of the segments, one after another."""
    table = np.array(segments, dtype=np.int64).reshape(-1, 4)
    lengths = table[:, 2] - table[:, 1]
    ends = np.cumsum(lengths)
    # Row i of the result lies `i - (its segment's first place)` rows into that segment.
    inside = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(ends - lengths, lengths)
    local = np.repeat(table[:, 3], lengths) + inside
    rows = np.repeat(request_starts[table[:, 0]] + table[:, 1], lengths) + inside
    return local, rows


def _frozen(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """The array, read-only from here on."""
    array.flags.writeable = False
    return array
