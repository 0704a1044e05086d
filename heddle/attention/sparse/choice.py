"""Which keys each row attends to: every rank ranks its own, then all agree on the best.

    index queries --gather--> scores of the keys stored here, bound per row
                  best K of this rank --gather--> best k of all, the same on every rank

Legend: `n` local rows of a class, `R` rows after the gather, `Hi`, `Di` heads and width of the
indexer, `K` places of a list, `N` DCP ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from heddle.attention.exchange.placement import Placement
from heddle.attention.sparse.kind import SparseLatentKind
from heddle.attention.sparse.packing import (
    pack_candidates,
    pack_queries,
    unpack_candidates,
    unpack_queries,
)
from heddle.attention.sparse.scoring import index_scores, rows_at_once
from heddle.attention.sparse.selection import (
    NO_ID,
    Candidates,
    Selection,
    global_top_k,
    local_top_k,
)
from heddle.attention.storage import KVStore
from heddle.comm.base import Communicator
from heddle.layout.kv import KVLayout
from heddle.step.views import LocalRange

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """The gathered rows of one request."""

    rows: IntArray
    """Among the `R` gathered rows; not empty."""
    positions: IntArray
    """Of each of them."""
    block_table: IntArray
    layout: KVLayout


class LocalSequence:
    """The keys of one request on this rank, located once per step and used by every layer."""

    def __init__(self, request: RequestRows, store: KVStore, rank: int) -> None:
        layout, table = request.layout, request.block_table
        visible = layout.visible_len(request.positions, rank)
        num_keys = int(visible.max())
        held = layout.global_position(np.arange(num_keys, dtype=np.int64), rank)
        whole = np.arange(int(request.positions.max()) + 1, dtype=np.int64)
        self.block_table = table
        self.rows = torch.from_numpy(request.rows)
        self.positions = torch.from_numpy(request.positions)
        self.visible = torch.from_numpy(visible)
        self.keys = store.locate(LocalRange(table, 0, num_keys))
        self.ids = torch.from_numpy(held.astype(np.int32))
        """Global positions of `keys`, ascending."""
        self.slots = torch.from_numpy(layout.slots(whole, table, rank))
        """Slot of every position of the sequence; -1 where it is stored elsewhere."""


class KeyChoice:
    """The choice of keys for one class of rows."""

    def __init__(
        self,
        sequences: list[LocalSequence],
        placement: Placement,
        *,
        width: int,
        top_k: int,
        store: KVStore,
        dcp: Communicator,
        index_group: Communicator | None,
    ) -> None:
        self.sequences = sequences
        self.placement = placement
        self.width = width
        self.top_k = top_k
        self.store = store
        self.dcp = dcp
        self.index_group = index_group

    def select(self, layer: int, kind: SparseLatentKind, own: slice) -> Selection:
        """The chosen keys of every gathered row.

        Args:
            layer: index of the layer.
            kind: its rows.
            own: the local rows of the class.
        """
        query, weights = self._gathered_index(kind, own)
        found = self._candidates(layer, kind, query, weights)
        if self.dcp.world_size > 1:
            found = unpack_candidates(self.dcp.all_gather(pack_candidates(found)))
        else:
            found = Candidates(found.scores.unsqueeze(0), found.ids.unsqueeze(0))
        return global_top_k(found, self.top_k)

    def _gathered_index(
        self, kind: SparseLatentKind, own: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries `[R, Hi, Di]` and weights `[R, Hi]`."""
        packed = pack_queries(kind.index)[own]
        if self.index_group is not None:
            packed = self.index_group.all_gather(packed).flatten(0, 1)
        return unpack_queries(packed, kind.index.index_query.shape[-1])

    def _candidates(
        self, layer: int, kind: SparseLatentKind, query: torch.Tensor, weights: torch.Tensor
    ) -> Candidates:
        """`[R, K]`: this rank's best keys of every gathered row; none on pads."""
        shape = (self.placement.gathered_rows, self.width)
        found = Candidates(
            torch.full(shape, -torch.inf, device=query.device),
            torch.full(shape, NO_ID, dtype=torch.int32, device=query.device),
        )
        for sequence in self.sequences:
            rows = self.store.keys(layer, sequence.keys, query.dtype)
            keys = kind.index_keys(rows)
            step = rows_at_once(query.shape[1], len(keys))
            for first in range(0, len(sequence.rows), step):
                part = slice(first, first + step)
                rows = sequence.rows[part]
                best = self._best(sequence, part, query[rows], weights[rows], keys)
                found.scores[rows] = best.scores
                found.ids[rows] = best.ids
        return found

    def _best(
        self,
        sequence: LocalSequence,
        part: slice,
        query: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
    ) -> Candidates:
        visible = sequence.visible[part]
        # A row with at most k keys takes them all, however they score.
        needed = torch.where(sequence.positions[part] < self.top_k, 0, visible)
        scores = index_scores(query, weights, keys, needed.tolist())
        return local_top_k(scores, sequence.ids, visible, self.width)
