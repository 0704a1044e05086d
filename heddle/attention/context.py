"""The context part of distributed rows: cached keys [0, C), all visible, sharded over the DCP
group.

    travelling   queries visit every shard, partial results return and are merged (`gather_q`)
    staying      shards visit the queries, piece by piece in a bounded workspace (`gather_kv`;
    `local` where dcp = 1)

Legend: `n` distributed rows, `h` lanes, `N` DCP ranks, `L` rows that a rank sends, `Ks`, `W` stored
heads and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from heddle.attention.exchange.base import gather_query
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.resources import AttentionResources
from heddle.attention.state import AttentionState, merge
from heddle.attention.storage import SlotRange
from heddle.layout.heads import HeadRun
from heddle.step.localize import KeyContextChunk, KeyContextPiece, RankStep


class TravellingContext:
    """Queries go to the keys."""

    def __init__(self, step: RankStep, resources: AttentionResources) -> None:
        self.step = step
        self.resources = resources
        self.is_used = step.plan.context_exchange == "gather_q"
        self.parts = [
            (torch.tensor(part.rows), resources.store.locate(part.keys))
            for part in step.query_context
        ]
        self.visible = torch.tensor(step.context_visible)
        self.placement = resources.placement(step, step.num_distributed, is_copy=False)
        self.exchange = resources.exchange(step.plan.merge_exchange)

    def run(self, layer: int, kind: AttentionKind) -> AttentionState | None:
        """State `[n, h]` over the cached context, or None when the plan says that no query
        travels.
        """
        if not self.is_used or self.exchange is None:
            return None
        dcp = self.resources.groups.dcp
        query = kind.travelling_query[self.step.num_copy :]
        gathered = gather_query(query, self.placement, dcp, self.resources.groups.slice)
        local = self._visit(layer, kind, gathered)
        merged = self.exchange.merge(local, self.visible, self.placement, dcp)
        return AttentionState(kind.finish(merged.out), merged.lse)

    def _visit(self, layer: int, kind: AttentionKind, query: torch.Tensor) -> AttentionState:
        """All gathered queries against the keys of this rank; nil where it holds none."""
        width = kind.stored(kind.rows)[1].shape[-1]
        state = AttentionState.nil((*query.shape[:2], width), dtype=self.resources.partial_dtype)
        for rows, slots in self.parts:
            stored = self.resources.store.read(layer, slots).to(query.dtype)
            key, value = kind.stored(stored)
            found = self.resources.backend.attend(
                query.index_select(0, rows),
                key,
                value,
                self.resources.gathered_runs,
                len(slots),
                kind.scale,
            )
            state.out.index_copy_(0, rows, found.out)
            state.lse.index_copy_(0, rows, found.lse)
        return state


class StayingContext:
    """Keys come to the queries."""

    def __init__(self, step: RankStep, resources: AttentionResources) -> None:
        self.resources = resources
        self.chunks = [
            (
                chunk,
                [resources.store.locate(keys) for keys in chunk.sends],
                [torch.tensor(piece.gathered) for piece in chunk.pieces],
            )
            for chunk in step.key_context
        ]

    def run(
        self, layer: int, kind: AttentionKind, query: torch.Tensor, runs: Sequence[HeadRun]
    ) -> dict[int, AttentionState]:
        """One state per request of which this rank has rows, over its whole cached context.

        Args:
            layer: index of the layer.
            kind: the layer's queries.
            query: `[n, h, D]`.
            runs: head map against expanded rows.
        """
        found: dict[int, AttentionState] = {}
        for chunk, sends, gathered in self.chunks:
            for piece, rows in self._pieces(layer, chunk, sends, gathered):
                if piece.start == piece.end:
                    continue
                key, value = kind.expand(rows.to(query.dtype))
                state = self.resources.backend.attend(
                    query[piece.start : piece.end], key, value, runs, len(rows), kind.scale
                )
                earlier = found.get(piece.request)
                found[piece.request] = (
                    state if earlier is None else merge([earlier, state], strict=False)
                )
        return found

    def _pieces(
        self,
        layer: int,
        chunk: KeyContextChunk,
        sends: Sequence[SlotRange],
        gathered: Sequence[torch.Tensor],
    ) -> Iterator[tuple[KeyContextPiece, torch.Tensor]]:
        """The complete rows of each piece: read in place where dcp = 1, else gathered."""
        store, dcp = self.resources.store, self.resources.groups.dcp
        shares = [store.read(layer, slots) for slots in sends]
        if dcp.world_size == 1:
            yield from zip(chunk.pieces, shares, strict=True)
            return
        shard = shares[0].new_zeros((chunk.padded_local_rows, *shares[0].shape[1:]))
        offset = 0
        for share in shares:
            shard[offset : offset + len(share)] = share
            offset += len(share)
        rows = dcp.all_gather(shard).flatten(0, 1)  # [N * L, Ks, W]
        for piece, index in zip(chunk.pieces, gathered, strict=True):
            yield piece, rows.index_select(0, index)
