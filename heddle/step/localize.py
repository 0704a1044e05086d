"""One plan -> what one rank does: its rows, its slots, its visible lengths.

Local rows come in this order, the same number on every rank:

    | COPY rows            | distributed rows of this rank            | pads |
    0                num_copy                                              M

New KV reaches each rank once: COPY rows from its own copy, distributed rows from the PCP gather.
`slot_mapping` covers both, in that order.

Legend: `M` local rows, `n` padded distributed rows, `P` PCP size, `N` DCP size, `P'` PCP ranks in a
DCP group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle.layout.kv import KVLayout
from heddle.layout.rows import RowClass, Segment
from heddle.step.batch import ScheduledRequest
from heddle.step.context import ContextPiece
from heddle.step.coverage import mix
from heddle.step.plan import StepPlan
from heddle.step.topology import Topology
from heddle.units import PAD_SLOT_ID

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LocalRange:
    """Local indices [start, end) of one sequence on this rank, by its block table."""

    block_table: IntArray
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CopyPart:
    """COPY rows of one request: they are written first and attend once."""

    start: int
    """First local row."""
    end: int
    keys: LocalRange
    visible: IntArray
    """`[end - start]`: keys that each row sees on this rank."""


@dataclass(frozen=True, slots=True)
class SelfSegment:
    """One run of a request's new rows on this rank, relative to the distributed rows."""

    start: int
    end: int
    first_visible: int
    """New keys that the first row sees; each next row sees one more."""


@dataclass(frozen=True, slots=True)
class DistributedPart:
    """Distributed rows of one request on this rank; `start == end` when it has none."""

    request: int
    start: int
    end: int
    key_start: int
    """First new key of the request, in global order of the distributed rows."""
    segments: tuple[SelfSegment, ...]


@dataclass(frozen=True, slots=True)
class QueryContextPart:
    """`gather_q`: the gathered queries of one request and this rank's share of its context."""

    rows: IntArray
    """Rows among the `P' * n` gathered queries."""
    keys: LocalRange


@dataclass(frozen=True, slots=True)
class KeyContextPiece:
    """`gather_kv`: one piece of one request's context after the gather."""

    request: int
    start: int
    """First of this rank's rows of the request, relative to the distributed rows."""
    end: int
    gathered: IntArray
    """Rows of the piece among the `N * padded_local_rows` gathered rows, pads left out."""


@dataclass(frozen=True, slots=True)
class KeyContextChunk:
    """`gather_kv`: what this rank sends, and how it reads what it receives."""

    sends: tuple[LocalRange, ...]
    padded_local_rows: int
    pieces: tuple[KeyContextPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """This rank's part of a step; indices only."""

    plan: StepPlan
    pcp_rank: int
    tp_rank: int
    dcp_rank: int
    num_copy: int
    num_distributed: int
    token_ids: IntArray
    """`[M]`; 0 on pads."""
    positions: IntArray
    """`[M]`; 0 on pads."""
    slot_mapping: IntArray
    """`[num_copy + P * n]`: slot on this rank, or -1: COPY rows, then gathered distributed rows."""
    coverage: int
    """Mix of the rows written here."""
    copy_parts: tuple[CopyPart, ...]
    copy_visible: BoolArray
    """`[N, num_copy]`: does DCP position r store a key that the row sees?"""
    distributed_order: IntArray
    """Gathered distributed rows in global order."""
    distributed_parts: tuple[DistributedPart, ...]
    query_context: tuple[QueryContextPart, ...]
    context_visible: BoolArray
    """`[N, P' * n]`: does DCP position r store context of the gathered row's request?"""
    key_context: tuple[KeyContextChunk, ...]

    @property
    def num_local_rows(self) -> int:
        """`M`."""
        return self.num_copy + self.num_distributed


def localize(plan: StepPlan, topology: Topology, global_rank: int) -> RankStep:
    """This rank's part of a plan.

    Args:
        plan: the plan that all ranks share.
        topology: constants of the engine.
        global_rank: rank in the world.
    """
    return _Localizer(plan, topology, global_rank).run()


class _Localizer:
    """Carries what the pieces of `localize` share."""

    def __init__(self, plan: StepPlan, topology: Topology, global_rank: int) -> None:
        coord = topology.mesh.coord_of(global_rank)
        self.plan = plan
        self.topology = topology
        self.rows = plan.rows
        self.pcp_rank = coord.pcp
        self.tp_rank = coord.tp
        self.dcp_rank = topology.mesh.position("dcp", global_rank)
        self.dcp_size = topology.mesh.dcp_size
        requests = plan.batch.requests
        self.request_of_row = np.repeat(
            np.arange(len(requests)),
            np.array([len(request.token_ids) for request in requests], dtype=np.int64),
        )
        self.position_of_row = _concatenate(
            np.arange(len(r.token_ids), dtype=np.int64) + r.num_computed_tokens for r in requests
        )
        self.token_of_row = _concatenate(
            np.asarray(request.token_ids, dtype=np.int64) for request in requests
        )

    def run(self) -> RankStep:
        rows = self.rows
        local = rows.local_rows(self.pcp_rank)
        valid = self._valid(self.pcp_rank)
        slot_mapping, coverage = self._slots()
        visible_lens = self._copy_visible_lens()
        exchange = self.plan.context_exchange
        return RankStep(
            plan=self.plan,
            pcp_rank=self.pcp_rank,
            tp_rank=self.tp_rank,
            dcp_rank=self.dcp_rank,
            num_copy=rows.num_copy,
            num_distributed=rows.num_distributed,
            token_ids=np.where(valid, self.token_of_row[local], 0),
            positions=np.where(valid, self.position_of_row[local], 0),
            slot_mapping=slot_mapping,
            coverage=coverage,
            copy_parts=tuple(self._copy_parts(visible_lens)),
            copy_visible=visible_lens > 0,
            distributed_order=rows.distributed_order,
            distributed_parts=tuple(self._distributed_parts(self.pcp_rank)),
            query_context=tuple(self._query_context()) if exchange == "gather_q" else (),
            context_visible=self._context_visible(),
            key_context=tuple(self._key_context()),
        )

    # -- rows ---------------------------------------------------------------------------------

    def _valid(self, pcp_rank: int) -> BoolArray:
        """`[M]`: false on the pads of a PCP rank."""
        per_rank = self.rows.num_local_rows
        return self.rows.valid[pcp_rank * per_rank : (pcp_rank + 1) * per_rank]

    def _segments(self, pcp_rank: int, *, copied: bool) -> Iterator[tuple[int, int, Segment]]:
        """(first local row, end, segment) of the COPY or of the distributed rows of a PCP rank."""
        row = 0
        for segment in self.rows.segments(pcp_rank):
            end = row + segment.end - segment.start
            if (self.plan.classes[segment.request] is RowClass.COPY) == copied:
                yield row, end, segment
            row = end

    def _request(self, index: int) -> tuple[ScheduledRequest, KVLayout]:
        request = self.plan.batch.requests[index]
        return request, self.topology.kv_layout(request.start_rank)

    # -- writes -------------------------------------------------------------------------------

    def _slots(self) -> tuple[IntArray, int]:
        """Slot of every row this rank sees, and the mix of those it stores."""
        rows = self.rows
        per_rank = rows.num_local_rows
        seen = [rows.gather[: rows.num_copy]]
        valid = [np.ones(rows.num_copy, dtype=np.bool_)]
        for pcp_rank in range(rows.pcp_size):
            part = slice(pcp_rank * per_rank + rows.num_copy, (pcp_rank + 1) * per_rank)
            seen.append(rows.gather[part])
            valid.append(rows.valid[part])
        global_rows = np.concatenate(seen)
        slot_of_row = _concatenate(
            self._request_slots(index) for index in range(len(self.plan.batch.requests))
        )
        slots = np.where(np.concatenate(valid), slot_of_row[global_rows], PAD_SLOT_ID)
        stored = slots != PAD_SLOT_ID
        written = global_rows[stored]
        ids = np.array([request.request_id for request in self.plan.batch.requests], dtype=np.int64)
        coverage = mix(
            ids[self.request_of_row[written]], self.position_of_row[written], slots[stored]
        )
        return slots, coverage

    def _request_slots(self, index: int) -> IntArray:
        request, layout = self._request(index)
        first = request.num_computed_tokens
        positions = np.arange(first, first + len(request.token_ids), dtype=np.int64)
        return layout.slots(positions, np.asarray(request.block_table), self.dcp_rank)

    # -- COPY rows ----------------------------------------------------------------------------

    def _copy_parts(self, visible_lens: IntArray) -> Iterator[CopyPart]:
        for start, end, segment in self._segments(self.pcp_rank, copied=True):
            request, _ = self._request(segment.request)
            visible = visible_lens[self.dcp_rank, start:end]
            yield CopyPart(start, end, self._keys(request, 0, int(visible[-1])), visible)

    def _copy_visible_lens(self) -> IntArray:
        """`[N, num_copy]`: keys that each COPY row sees on each DCP rank.

        All rows of one layout at once: a step may hold a hundred decodes, each of one row.
        """
        found = np.empty((self.dcp_size, self.rows.num_copy), dtype=np.int64)
        copied = self.rows.gather[: self.rows.num_copy]
        positions = self.position_of_row[copied]
        start_ranks = np.array([request.start_rank for request in self.plan.batch.requests])
        starts = start_ranks[self.request_of_row[copied]]
        for start_rank in np.unique(starts).tolist():
            layout, rows = self.topology.kv_layout(start_rank), starts == start_rank
            for rank in range(self.dcp_size):
                found[rank, rows] = layout.visible_len(positions[rows], rank)
        return found

    # -- distributed rows ---------------------------------------------------------------------

    def _distributed_parts(self, pcp_rank: int) -> Iterator[DistributedPart]:
        """One part per distributed request, in batch order within each class, as the rows lie."""
        key_starts = self._key_starts()
        grouped: dict[int, list[SelfSegment]] = {}
        for start, end, segment in self._segments(pcp_rank, copied=False):
            shift = self.rows.num_copy
            grouped.setdefault(segment.request, []).append(
                SelfSegment(start - shift, end - shift, segment.start + 1)
            )
        for request, segments in grouped.items():
            yield DistributedPart(
                request, segments[0].start, segments[-1].end, key_starts[request], tuple(segments)
            )

    def _key_starts(self) -> dict[int, int]:
        """First new key of each distributed request, in global order of the distributed rows."""
        starts: dict[int, int] = {}
        total = 0
        for index, request in enumerate(self.plan.batch.requests):
            if self.plan.classes[index] is not RowClass.COPY:
                starts[index] = total
                total += len(request.token_ids)
        return starts

    # -- context ------------------------------------------------------------------------------

    def _keys(self, request: ScheduledRequest, start: int, end: int) -> LocalRange:
        return LocalRange(np.asarray(request.block_table, dtype=np.int64), start, end)

    def _group_pcp_ranks(self) -> range:
        """PCP ranks of this rank's DCP group, in the order of its row blocks."""
        replicas = self.topology.mesh.num_replicas
        first = self.pcp_rank // replicas * replicas
        return range(first, first + replicas)

    def _gathered_context_rows(self) -> dict[int, IntArray]:
        """Per request with context: its rows among the `P' * n` gathered queries."""
        found: dict[int, list[IntArray]] = {}
        for block, pcp_rank in enumerate(self._group_pcp_ranks()):
            base = block * self.rows.num_distributed
            for part in self._distributed_parts(pcp_rank):
                if self.plan.batch.requests[part.request].num_computed_tokens > 0:
                    found.setdefault(part.request, []).append(
                        np.arange(base + part.start, base + part.end, dtype=np.int64)
                    )
        return {request: np.concatenate(parts) for request, parts in found.items()}

    def _query_context(self) -> Iterator[QueryContextPart]:
        for index, gathered in self._gathered_context_rows().items():
            request, layout = self._request(index)
            length = layout.local_len(request.num_computed_tokens, self.dcp_rank)
            if length > 0 and len(gathered) > 0:
                yield QueryContextPart(gathered, self._keys(request, 0, length))

    def _context_visible(self) -> BoolArray:
        num_rows = self.topology.mesh.num_replicas * self.rows.num_distributed
        found = np.zeros((self.dcp_size, num_rows), dtype=np.bool_)
        if self.plan.context_exchange != "gather_q":
            return found
        for index, gathered in self._gathered_context_rows().items():
            request, layout = self._request(index)
            for rank in range(self.dcp_size):
                found[rank, gathered] = layout.local_len(request.num_computed_tokens, rank) > 0
        return found

    def _key_context(self) -> Iterator[KeyContextChunk]:
        my_rows = {
            part.request: (part.start, part.end) for part in self._distributed_parts(self.pcp_rank)
        }
        for chunk in self.plan.context_chunks:
            sends = tuple(self._sent(piece) for piece in chunk.pieces)
            offsets = [0] * self.dcp_size
            pieces: list[KeyContextPiece] = []
            for piece in chunk.pieces:
                gathered = self._received(piece, offsets, chunk.padded_local_rows)
                start, end = my_rows.get(piece.request, (0, 0))
                pieces.append(KeyContextPiece(piece.request, start, end, gathered))
            yield KeyContextChunk(sends, chunk.padded_local_rows, tuple(pieces))

    def _sent(self, piece: ContextPiece) -> LocalRange:
        request, layout = self._request(piece.request)
        start, end = layout.local_range(piece.start, piece.end, self.dcp_rank)
        return self._keys(request, start, end)

    def _received(self, piece: ContextPiece, offsets: list[int], padded: int) -> IntArray:
        """Rows of a piece in the gathered chunk; moves `offsets` (per sender) past them."""
        _, layout = self._request(piece.request)
        parts: list[IntArray] = []
        for rank in range(self.dcp_size):
            start, end = layout.local_range(piece.start, piece.end, rank)
            base = rank * padded + offsets[rank]
            parts.append(np.arange(base, base + end - start, dtype=np.int64))
            offsets[rank] += end - start
        return np.concatenate(parts)


def _concatenate(parts: Iterable[IntArray]) -> IntArray:
    """`np.concatenate` that also accepts no parts."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
