"""Cutting cached context into pieces that fit a bounded workspace.

Under `gather_kv` every rank receives the cached context of the step's distributed rows, at most `W`
rows at a time. The list of pieces depends on context lengths, the layouts and `W` only, so all
ranks walk the same list.

    request 0 |##########|                 chunk 0 = [r0: 0..65) + [r1: 0..60)
    request 1 |###############|            chunk 1 = [r1: 60..96)

Legend: `N` ranks of the DCP group, `I` interleave, `W` workspace rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heddle.layout.kv import KVLayout


class ContextSpan(NamedTuple):
    """Cached positions [start, end) of a request that some row of a class sees."""

    request: int
    start: int
    end: int
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class ContextPiece:
    """Global positions [start, end) of one request's cached context; N*I divides `start`."""

    request: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Pieces that are gathered together."""

    pieces: tuple[ContextPiece, ...]
    padded_local_rows: int
    """Rows that each rank sends: the largest share over ranks."""


def plan_context_chunks(spans: Sequence[ContextSpan], workspace: int) -> tuple[ContextChunk, ...]:
    """Tile every span once, in batch order, filling each chunk greedily.

    A span that starts within a round of ownership is begun at the start of that round: its pieces
    may hold a few keys that nobody sees.

    Args:
        spans: in batch order; the layouts share N and I and may differ in their start rank.
        workspace: `W`, rows of gathered context held at once; raised to N*I where it is smaller.
    Returns:
        Chunks whose gathered size `N * padded_local_rows` never exceeds the workspace.
    Source: docs/exchanges.md, "Context in bounded pieces".
    """
    chunks: list[ContextChunk] = []
    open_pieces: list[tuple[ContextPiece, KVLayout]] = []
    room = 0
    for request, first, end, layout in spans:
        start = first // layout.round_size * layout.round_size if first < end else end
        while start < end:
            cut = _furthest_end(layout, start, end, room)
            if cut == start:
                _close(chunks, open_pieces)
                room = max(workspace, layout.round_size)
                continue
            open_pieces.append((ContextPiece(request, start, cut), layout))
            room -= _gathered_rows(layout, start, cut)
            start = cut
    _close(chunks, open_pieces)
    return tuple(chunks)


def _gathered_rows(layout: KVLayout, start: int, end: int) -> int:
    """Rows of all ranks when each sends its share of [start, end), padded to the largest."""
    return layout.world_size * (layout.max_local_len(end) - layout.max_local_len(start))


def _furthest_end(layout: KVLayout, start: int, length: int, room: int) -> int:
    """Largest end of a piece that fits: the whole rest, or a whole number of ownership rounds."""
    if _gathered_rows(layout, start, length) <= room:
        return length
    return start + room // layout.round_size * layout.round_size


def _close(chunks: list[ContextChunk], open_pieces: list[tuple[ContextPiece, KVLayout]]) -> None:
    """Turn the open pieces into a chunk."""
    if not open_pieces:
        return
    num_ranks = open_pieces[0][1].world_size
    shares = (
        sum(
            end - start
            for piece, layout in open_pieces
            for start, end in [layout.local_range(piece.start, piece.end, rank)]
        )
        for rank in range(num_ranks)
    )
    chunks.append(ContextChunk(tuple(piece for piece, _ in open_pieces), max(shares)))
    open_pieces.clear()
