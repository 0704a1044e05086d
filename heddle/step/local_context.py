"""The cached context of distributed rows on one rank, when queries travel and when keys do.

A chunk of gathered keys is put into order of position, so that every rule of visibility is one
range per row again, however the positions were dealt to ranks. Where keys are to be met in several
parts (shards that come one by one, canonical lanes), each part is in order of position too, and the
interval law makes one range per row of it.

    gather_kv, local    one part: all positions of the piece
    ring_kv             a part per rank: what it stores
    canonical lanes     a part per lane, however the keys came here

Legend: `N` ranks that share a sequence's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heddle.config.visibility import Visibility
from heddle.layout.kv import KVLayout
from heddle.step.context import ContextChunk, ContextPiece
from heddle.step.lanes import MergeLanes
from heddle.step.views import LocalRange, Ranges, visible_ranges

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryContextPart:
    """Queries travel: some gathered queries and a part of this rank's share of their context."""

    rows: IntArray
    """Among the gathered queries."""
    keys: LocalRange
    ranges: Ranges
    """Relative to the first of `keys`."""
    lane: int = 0
    """Place of the keys' lane among those of this rank."""


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Keys of a piece that are met together, in order of position."""

    index: IntArray | slice
    """Among the keys that came: those of the chunk if gathered, else of the piece or shard."""
    ranges: tuple[Ranges, ...]
    """What the rows meet, relative to the part's first key; none where they meet nothing."""


@dataclass(frozen=True, slots=True)
class KeyContextPiece:
    """Keys travel: one piece of one request's context, for this rank's rows of the request."""

    request: int
    start: int
    """First of the rows, relative to the class."""
    end: int
    parts: tuple[KeyPart, ...]
    """Equally many for each piece of a chunk."""


@dataclass(frozen=True, slots=True)
class KeyContextChunk:
    """Keys travel: what this rank sends, and how it reads what it receives."""

    sends: tuple[LocalRange, ...]
    padded_local_rows: int
    pieces: tuple[KeyContextPiece, ...]


class CachedSequence(NamedTuple):
    """The stored part of one request."""

    block_table: IntArray
    layout: KVLayout
    num_cached: int


class OwnRows(NamedTuple):
    """This rank's rows [start, end) of one request, relative to their class."""

    start: int
    end: int
    positions: IntArray


class KeyContextBuilder:
    """Chunks of one class of rows, as a rank sends and reads them."""

    def __init__(
        self,
        context: str,
        rule: Visibility,
        lanes: MergeLanes | None,
        place: int,
        sequence_of: Callable[[int], CachedSequence],
        own_rows: Mapping[int, OwnRows],
    ) -> None:
        """Note what all chunks share.

        Args:
            context: `local`, `gather_kv` or `ring_kv`.
            rule: visible keys of the layers.
            lanes: canonical lanes, if asked for.
            place: of this rank among those that share a sequence's keys.
            sequence_of: stored part of a request, by its index in the batch.
            own_rows: by request; absent where this rank has none.
        """
        self.context = context
        self.rule = rule
        self.lanes = lanes
        self.place = place
        self.sequence_of = sequence_of
        self.own_rows = own_rows

    def build(self, chunk: ContextChunk) -> KeyContextChunk:
        """One chunk of the plan."""
        offsets: dict[int, int] = {}
        sends, pieces = [], []
        for piece in chunk.pieces:
            sequence = self.sequence_of(piece.request)
            start, end = sequence.layout.local_range(piece.start, piece.end, self.place)
            sends.append(LocalRange(sequence.block_table, start, end))
            came = self._came(piece, sequence.layout, offsets, chunk.padded_local_rows)
            rows = self.own_rows.get(piece.request, OwnRows(0, 0, np.empty(0, dtype=np.int64)))
            parts = tuple(self._parts(piece, sequence, rows.positions, came))
            pieces.append(KeyContextPiece(piece.request, rows.start, rows.end, parts))
        return KeyContextChunk(tuple(sends), chunk.padded_local_rows, tuple(pieces))

    def _came(
        self, piece: ContextPiece, layout: KVLayout, offsets: dict[int, int], padded: int
    ) -> IntArray:
        """Where each position of a piece lies among the keys that came; moves `offsets` on.

        A sender's share of a chunk is one run per piece, in the order of the pieces.
        """
        positions = np.arange(piece.start, piece.end, dtype=np.int64)
        if self.context == "local":
            return positions - piece.start  # each piece is read by itself
        firsts = np.empty(layout.world_size, dtype=np.int64)
        for sender in range(layout.world_size):
            start, end = layout.local_range(piece.start, piece.end, sender)
            base = 0 if self.context == "ring_kv" else sender * padded
            firsts[sender] = base + offsets.get(sender, 0) - start
            offsets[sender] = offsets.get(sender, 0) + end - start
        came: IntArray = firsts[layout.owner(positions)] + layout.local_index(positions)
        return came

    def _parts(
        self, piece: ContextPiece, sequence: CachedSequence, rows: IntArray, came: IntArray
    ) -> Iterator[KeyPart]:
        """The parts of a piece, and what rows at some positions meet of each."""
        layout = self._part_layout(sequence.layout)
        owner = layout.owner(np.arange(piece.start, piece.end, dtype=np.int64))
        seen = [part.clipped(0, sequence.num_cached) for part in visible_ranges(self.rule, rows)]
        for number in range(layout.world_size):
            start, end = layout.local_range(piece.start, piece.end, number)
            ranges = (part.local(layout, number).clipped(start, end) for part in seen)
            yield KeyPart(
                as_slice(came[owner == number]),
                tuple(part for part in ranges if not part.is_empty),
            )

    def _part_layout(self, layout: KVLayout) -> KVLayout:
        """Who would own the positions if each part had a rank of its own."""
        if self.context == "ring_kv":
            return layout
        if self.lanes is not None:
            return self.lanes.layout(layout)
        return KVLayout(1, layout.interleave_size, layout.block_size)


def as_slice(index: IntArray) -> IntArray | slice:
    """Consecutive indices as a slice, which reads as a view."""
    if len(index) == 0:
        return slice(0, 0)
    if len(index) == index[-1] - index[0] + 1 and bool((np.diff(index) == 1).all()):
        return slice(int(index[0]), int(index[-1]) + 1)
    return index
