"""The context part of distributed rows whose queries stay: cached keys come to them.

    local       every rank holds its whole context and reads it in place
    gather_kv   pieces of all shards are gathered, chunk after chunk in a bounded workspace
    ring_kv     whole shards go round the group, one after another

Keys are met in parts (`heddle.step.local_context`): a state per part is kept to the end and merged
in the order of parts, whatever the order in which they came.

Rows travel as they are kept, and each rank decodes those that it meets.

Legend: `n` rows of a class, `h` lanes, `N` DCP ranks, `L` rows that a rank sends, `Ks` stored kv
heads, `W'` elements of a stored row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from heddle.attention.backends.base import Visible
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.paged_rows import PagedRows, RowView
from heddle.attention.resources import AttentionResources
from heddle.attention.ring import visitors
from heddle.attention.state import AttentionState
from heddle.attention.storage import SlotRange
from heddle.attention.views import attend, joined, visible_of
from heddle.layout.heads import HeadRun
from heddle.step.local_context import KeyContextChunk
from heddle.step.local_group import ClassStep


@dataclass(frozen=True, slots=True)
class _Part:
    """Keys met together, by rows [rows) of the class."""

    number: int
    rows: slice
    index: torch.Tensor | slice
    """Among the keys that came."""
    visible: tuple[Visible, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What is read here, padded to `L` rows, and the parts of each piece."""

    sends: tuple[SlotRange, ...]
    padded_rows: int
    pieces: tuple[tuple[_Part, ...], ...]


class StayingContext:
    """Keys come to the queries."""

    def __init__(self, rows: ClassStep, resources: AttentionResources) -> None:
        self.context = rows.plan.context
        self.resources = resources
        self.paged = self._paged(rows)
        self.chunks = [] if self.paged else [self._located(chunk) for chunk in rows.key_context]

    def _paged(self, rows: ClassStep) -> PagedRows | None:
        """Keys that are all here, of a kind whose queries meet them as they lie, are not copied."""
        model = self.resources.topology.model
        if self.context != "local" or self.resources.topology.lanes or model.mla is not None:
            return None
        views = [
            RowView(slice(piece.start, piece.end), keys, ranges)
            for chunk in rows.key_context
            for keys, piece in zip(chunk.sends, chunk.pieces, strict=True)
            for part in piece.parts
            for ranges in part.ranges
        ]
        return PagedRows.of(views, rows.num_rows, self.resources) if views else None

    def _located(self, chunk: KeyContextChunk) -> _Chunk:
        pieces = []
        for piece in chunk.pieces:
            rows = slice(piece.start, piece.end)
            pieces.append(
                tuple(
                    _Part(
                        number,
                        rows,
                        part.index if isinstance(part.index, slice) else torch.tensor(part.index),
                        tuple(visible_of(ranges) for ranges in part.ranges),
                    )
                    for number, part in enumerate(piece.parts)
                )
            )
        sends = tuple(self.resources.store.locate(keys) for keys in chunk.sends)
        return _Chunk(sends, chunk.padded_local_rows, tuple(pieces))

    def run(
        self, layer: int, kind: AttentionKind, query: torch.Tensor, runs: Sequence[HeadRun]
    ) -> AttentionState | None:
        """State `[n, h]` over the cached context; None when no row of this rank meets a key.

        Args:
            layer: index of the layer.
            kind: the layer's queries.
            query: `[n, h, D]`.
            runs: head map against expanded rows.
        """
        if self.paged is not None:
            return self.paged.attend(layer, kind, query, runs)
        states: dict[int, AttentionState] = {}
        for chunk in self.chunks:
            for part, rows in self._arrivals(layer, chunk):
                if part.visible:
                    met = self.resources.store.codec.decode(_pick(rows, part.index), query.dtype)
                    self._meet(states, part, kind, query, kind.expand(met), runs)
        if not states:
            return None
        return joined([states[number] for number in sorted(states)])

    def _meet(
        self,
        states: dict[int, AttentionState],
        part: _Part,
        kind: AttentionKind,
        query: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        runs: Sequence[HeadRun],
    ) -> None:
        """Take the state of a part on over more keys."""
        if part.number not in states:
            shape = (*query.shape[:2], keys[1].shape[-1])
            states[part.number] = AttentionState.nil(shape, dtype=self.resources.partial_dtype)
        state, rows = states[part.number], part.rows
        for visible in part.visible:
            found = attend(self.resources.backend, kind, query[rows], keys, runs, visible)
            merged = joined([AttentionState(state.out[rows], state.lse[rows]), found])
            state.out[rows], state.lse[rows] = merged.out, merged.lse

    def _arrivals(self, layer: int, chunk: _Chunk) -> Iterator[tuple[_Part, torch.Tensor]]:
        """Each part, and the rows `[..., Ks, W']` among which its keys lie."""
        shares = [self.resources.store.read(layer, slots) for slots in chunk.sends]
        if self.context == "local":
            for share, parts in zip(shares, chunk.pieces, strict=True):
                yield from ((part, share) for part in parts)
            return
        shard = shares[0].new_zeros((chunk.padded_rows, *shares[0].shape[1:]))
        torch.cat(shares, out=shard[: sum(map(len, shares))])
        dcp = self.resources.groups.dcp
        if self.context == "gather_kv":
            rows = dcp.all_gather(shard).flatten(0, 1)  # [N * L, Ks, W']
            yield from ((part, rows) for parts in chunk.pieces for part in parts)
            return
        for source, rows in visitors(dcp, shard):  # [L, Ks, W']
            yield from ((parts[source], rows) for parts in chunk.pieces)


def _pick(rows: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)
