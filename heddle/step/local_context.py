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

from collections.abc import Callable, Iterator, Mapping, Sequence
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


_NOTHING = KeyPart(slice(0, 0), ())


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


class _Shards(NamedTuple):
    """What each rank stores of the pieces of a chunk, and sends: one run per piece, in order.

    All are `[pieces, N]`.
    """

    first: IntArray
    """Local index of the first key."""
    length: IntArray
    offset: IntArray
    """Keys of earlier pieces in the shard."""
    padded: int
    """Rows of a shard."""

    @classmethod
    def of(
        cls, pieces: Sequence[ContextPiece], sequences: Sequence[CachedSequence], padded: int
    ) -> _Shards:
        bounds = np.array([piece[1:] for piece in pieces], dtype=np.int64)
        layouts = [sequence.layout for sequence in sequences]
        lens = np.empty((*bounds.shape, layouts[0].world_size), dtype=np.int64)  # [pieces, 2, N]
        starts = np.array([layout.start_rank for layout in layouts], dtype=np.int64)
        for layout in set(layouts):
            alike = starts == layout.start_rank
            lens[alike] = layout.local_lens(bounds[alike])
        first, length = lens[:, 0], lens[:, 1] - lens[:, 0]
        return cls(first, length, np.cumsum(length, axis=0) - length, padded)

    def stored(self, piece: int, rank: int) -> tuple[int, int]:
        """Local range of a piece on a rank."""
        start = int(self.first[piece, rank])
        return start, start + int(self.length[piece, rank])

    def in_shard(self, piece: int, sender: int) -> slice:
        """Where a piece lies in the shard of a sender."""
        count, offset = int(self.length[piece, sender]), int(self.offset[piece, sender])
        return slice(offset, offset + count) if count else slice(0, 0)

    def gathered(self, piece: int, layout: KVLayout, length: int) -> IntArray:
        """`[length]`: where each position of a piece lies among the shards of all ranks, one after
        another. A piece begins with a round, so positions are `[rounds, turn, place in the run]`.
        """
        run, ranks = layout.interleave_size, layout.world_size
        senders = (np.arange(ranks, dtype=np.int64) + layout.start_rank) % ranks
        firsts = senders * self.padded + self.offset[piece, senders]
        rounds = np.arange(-(-length // layout.round_size), dtype=np.int64) * run
        found: IntArray = rounds[:, None, None] + firsts[:, None] + np.arange(run, dtype=np.int64)
        return found.reshape(-1)[:length]


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
        sequences = [self.sequence_of(piece.request) for piece in chunk.pieces]
        shards = _Shards.of(chunk.pieces, sequences, chunk.padded_local_rows)
        sends, pieces = [], []
        for number, (piece, sequence) in enumerate(zip(chunk.pieces, sequences, strict=True)):
            start, end = shards.stored(number, self.place)
            sends.append(LocalRange(sequence.block_table, start, end))
            rows = self.own_rows.get(piece.request)
            if rows is None:  # keys on their way to others
                parts = (_NOTHING,) * self._part_layout(sequence.layout).world_size
                pieces.append(KeyContextPiece(piece.request, 0, 0, parts))
                continue
            parts = tuple(self._parts(piece, sequence, rows.positions, shards, number))
            pieces.append(KeyContextPiece(piece.request, rows.start, rows.end, parts))
        return KeyContextChunk(tuple(sends), chunk.padded_local_rows, tuple(pieces))

    def _parts(
        self,
        piece: ContextPiece,
        sequence: CachedSequence,
        rows: IntArray,
        shards: _Shards,
        number: int,
    ) -> Iterator[KeyPart]:
        """The parts of a piece, and what rows at some positions meet of each."""
        layout = self._part_layout(sequence.layout)
        seen = [part.clipped(0, sequence.num_cached) for part in visible_ranges(self.rule, rows)]
        indices = self._indices(piece, sequence.layout, shards, number)
        for place, index in enumerate(indices):
            start, end = layout.local_range(piece.start, piece.end, place)
            ranges = (part.local(layout, place).clipped(start, end) for part in seen)
            yield KeyPart(index, tuple(part for part in ranges if not part.is_empty))

    def _indices(
        self, piece: ContextPiece, layout: KVLayout, shards: _Shards, number: int
    ) -> Iterator[IntArray | slice]:
        """Where the keys of each part lie among those that came, in order of position."""
        if self.context == "ring_kv":
            for sender in range(layout.world_size):
                yield shards.in_shard(number, sender)
            return
        length = piece.end - piece.start
        if self.context == "local" and self.lanes is None:
            yield slice(0, length)  # each piece is read by itself
            return
        came = np.arange(length, dtype=np.int64)
        if self.context != "local":
            came = shards.gathered(number, layout, length)
        if self.lanes is None:
            yield as_slice(came)
            return
        positions = np.arange(piece.start, piece.end, dtype=np.int64)
        lane_of = self.lanes.layout(layout).owner(positions)
        for lane in range(self.lanes.num_lanes):
            yield as_slice(came[lane_of == lane])

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
