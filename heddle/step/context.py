"""Cutting cached context into pieces that fit a bounded workspace.

Under `gather_kv` every rank receives the cached context of the step's distributed rows, at most `W`
rows at a time. The list of pieces depends on context lengths, the layouts and `W` only, so all
ranks walk the same list.

    request 0 |##########|                 chunk 0 = [r0: 0..65) + [r1: 0..60)
    request 1 |###############|            chunk 1 = [r1: 60..96)

Legend: `N` ranks of the DCP group, `I` interleave, `W` workspace rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heddle.layout.kv import KVLayout

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ContextSpans:
    """Cached positions [start, end) of requests that some row of a class sees, in batch order.

    Columns `[S]`, for a step may hold hundreds of decodes. None is empty.
    """

    layout: KVLayout
    """Of chains that start on rank 0; all have its N and I."""
    request: IntArray
    start: IntArray
    end: IntArray
    start_rank: IntArray

    @classmethod
    def of(cls, layout: KVLayout, spans: Sequence[tuple[int, int, int, int]]) -> ContextSpans:
        """Spans by row: (request, start, end, start rank)."""
        table = np.array(spans, dtype=np.int64).reshape(-1, 4)
        return cls(layout, *table[table[:, 1] < table[:, 2]].T)

    def __len__(self) -> int:
        return len(self.request)

    @cached_property
    def _starts(self) -> IntArray:
        """First position of the round in which each span starts."""
        return self.start // self.layout.round_size * self.layout.round_size

    @cached_property
    def pieces(self) -> list[ContextPiece]:
        """Each span as one piece."""
        columns = (self.request, self._starts, self.end)
        return list(map(ContextPiece, *(column.tolist() for column in columns)))

    @cached_property
    def rows(self) -> list[int]:
        """Rows of each span when all ranks send their shares, padded to the largest: that of the
        rank which dealing begins with.
        """
        most = self.layout.local_len(self.end, 0) - self.layout.local_len(self._starts, 0)
        found: list[int] = (self.layout.world_size * most).tolist()
        return found

    @cached_property
    def layouts(self) -> dict[int, KVLayout]:
        """By request, where chains start on different ranks; else empty."""
        if len(self) == 0 or (self.start_rank == self.start_rank[0]).all():
            return {}
        pairs = zip(self.request.tolist(), self.start_rank.tolist(), strict=True)
        return {index: replace(self.layout, start_rank=rank) for index, rank in pairs}


class ContextPiece(NamedTuple):
    """Global positions [start, end) of one request's cached context; N*I divides `start`."""

    request: int
    start: int
    end: int


class ContextChunk(NamedTuple):
    """Pieces that are gathered together."""

    pieces: tuple[ContextPiece, ...]
    padded_local_rows: int
    """Rows that each rank sends: the largest share over ranks."""


def plan_context_chunks(spans: ContextSpans, workspace: int) -> tuple[ContextChunk, ...]:
    """Tile every span once, in batch order, filling each chunk greedily.

    A span that starts within a round of ownership is begun at the start of that round: its pieces
    may hold a few keys that nobody sees.

    Args:
        spans: what is to be met.
        workspace: `W`, rows of gathered context held at once; raised to N*I where it is smaller.
    Returns:
        Chunks whose gathered size `N * padded_local_rows` never exceeds the workspace.
    Source: docs/exchanges.md, "Context in bounded pieces".
    """
    layouts = spans.layouts
    chunks = []
    for *cut, num_rows in _cuts(spans, workspace):
        pieces = _pieces(spans.pieces, *cut)
        # Dealing begins on one rank: it has the most of every piece, so of all together.
        share = num_rows // spans.layout.world_size
        if layouts:
            share = largest_share(pieces, [layouts[piece.request] for piece in pieces])
        chunks.append(ContextChunk(tuple(pieces), share))
    return tuple(chunks)


def measure_context_chunks(spans: ContextSpans, workspace: int) -> tuple[ContextChunk, ...]:
    """The chunks of `plan_context_chunks` without their pieces, for a price: a step may cut a
    thousand short contexts in vain.
    """
    if spans.layouts:
        return plan_context_chunks(spans, workspace)
    shares = [num_rows // spans.layout.world_size for *_, num_rows in _cuts(spans, workspace)]
    made = {share: ContextChunk((), share) for share in set(shares)}  # most chunks are full
    return tuple(made[share] for share in shares)


def _cuts(spans: ContextSpans, workspace: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Each chunk as a run of spans; whole ones are taken at once.

    Yields:
        Spans [first, last); rows of the first one that earlier chunks hold; rows of the last one up
        to the end of the chunk, 0 for all; rows of the chunk.
    """
    rows, round_size = spans.rows, spans.layout.round_size
    workspace = max(workspace, round_size)
    ends = list(accumulate(rows))
    place = done = 0  # rows of the span in hand that earlier chunks hold
    while place < len(rows):
        first, start, room = place, done, workspace
        left = rows[place] - done
        if left <= room:
            place = bisect_right(ends, ends[place] + room - left, place + 1)
            room -= left + ends[place - 1] - ends[first]
            done = 0
        if place < len(rows) and room >= round_size:
            # A whole number of ownership rounds, of which every rank stores the same.
            cut = room // round_size * round_size
            done, room = done + cut, room - cut
        yield first, place + (done > 0), start, done, workspace - room


def _pieces(
    whole: Sequence[ContextPiece], first: int, last: int, start: int, end: int
) -> list[ContextPiece]:
    """The pieces of a chunk, see `_cuts`; whole rounds have as many rows as positions."""
    pieces = list(whole[first:last])
    if end:
        request, begin, _ = pieces[-1]
        pieces[-1] = ContextPiece(request, begin, begin + end)
    if start:
        request, begin, stop = pieces[0]
        pieces[0] = ContextPiece(request, begin + start, stop)
    return pieces


def largest_share(pieces: Sequence[ContextPiece], layouts: Sequence[KVLayout]) -> int:
    """Rows of all pieces on the rank that stores most of them.

    Args:
        pieces: of one chunk, at least one.
        layouts: of their sequences; they differ in their start rank at most.
    """
    bounds: dict[KVLayout, list[tuple[int, int]]] = {}
    for piece, layout in zip(pieces, layouts, strict=True):
        bounds.setdefault(layout, []).append((piece.start, piece.end))
    alike = [(layout, np.array(found, dtype=np.int64)) for layout, found in bounds.items()]
    return max(
        sum(int(np.diff(layout.local_len(found, rank)).sum()) for layout, found in alike)
        for rank in range(layouts[0].world_size)
    )
