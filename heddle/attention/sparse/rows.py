"""Rows of a sparse layer: written first, then each row attends once, wherever its keys lie.

    queries --gather--> meet the chosen keys that are stored here --exchange--> own rows and heads

The exchange needs to know who saw a key at all. For dense rows the plan knows; here the choice
itself tells, and every rank has made the same one. In a group of one nothing is sent.

Legend: `n` local rows of a class, `R` rows after the gather, `h` lanes, `k` ranks of a slice, `W`
width of a stored row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.attention.backends.selected import attend_selected
from heddle.attention.exchange.base import Exchange, gather_query
from heddle.attention.exchange.placement import Placement
from heddle.attention.sparse.choice import IntArray, KeyChoice, LocalSequence, RequestRows
from heddle.attention.sparse.kind import SparseLatentKind
from heddle.attention.sparse.selection import Selection
from heddle.attention.state import AttentionState, accumulation_dtype
from heddle.attention.storage import KVStore, SlotRange
from heddle.comm.base import RankGroups
from heddle.layout.mesh import GroupKind

_HELD_ELEMENTS = 1 << 24  # of gathered keys
_BEYOND = 2**31 - 1  # sorts behind every id


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseClass:
    """Rows of one class, as every rank of a DCP group knows them."""

    start: int
    """First local row."""
    requests: tuple[RequestRows, ...]
    placement: Placement
    width: int
    """Places of a list of best keys; from global facts, see `heddle.step.sparse.list_width`."""
    top_k: int
    exchange: Exchange | None
    """None in a group of one."""
    index_group: GroupKind | None
    """Where index queries are gathered; None: they are all here."""


class SparseRows:
    """Attention of one class of rows in the sparse layers of a step."""

    def __init__(self, rows: SparseClass, store: KVStore, groups: RankGroups) -> None:
        self.placement = rows.placement
        self.exchange = rows.exchange
        self.own = slice(rows.start, rows.start + rows.placement.num_rows)
        self.store = store
        self.groups = groups
        sequences = [LocalSequence(request, store, groups.dcp.rank) for request in rows.requests]
        self.slots, self.first_slot = _slot_table(sequences, rows.placement.gathered_rows)
        self.choice = KeyChoice(
            sequences,
            rows.placement,
            width=rows.width,
            top_k=rows.top_k,
            store=store,
            dcp=groups.dcp,
            index_group=None if rows.index_group is None else groups.of(rows.index_group),
        )

    def run(self, layer: int, kind: SparseLatentKind) -> torch.Tensor:
        """`[n, h, Dv]`, not narrower than a partial; zeros on pads."""
        query = kind.travelling_query[self.own]
        if self.groups.dcp.world_size > 1:
            query = gather_query(query, self.placement, self.groups)
        selection = self.choice.select(layer, kind, self.own)
        state = self._attend(layer, kind, query, selection)
        if self.exchange is not None:
            seen = selection.seen(self.placement.world_size)
            state = self.exchange.merge(state, seen, self.placement, self.groups.dcp)
        return kind.finish(state.out)

    def _attend(
        self, layer: int, kind: SparseLatentKind, query: torch.Tensor, selection: Selection
    ) -> AttentionState:
        """Each gathered row against those of its chosen keys that are stored here."""
        slots, count = self._own_slots(selection)
        width = kind.stored(kind.rows)[1].shape[-1]
        dtype = accumulation_dtype(query.dtype)
        state = AttentionState.nil((*query.shape[:2], width), dtype=dtype, device=query.device)
        step = max(1, _HELD_ELEMENTS // max(1, slots.shape[1] * kind.rows.shape[-1]))
        for first in range(0, len(query), step):
            rows = slice(first, first + step)
            key, value = kind.stored(self._read(layer, slots[rows], query.dtype))
            found = attend_selected(query[rows], key, value, count[rows], kind.scale)
            state.out[rows] = found.out
            state.lse[rows] = found.lse
        return _without_pad_lanes(state, self.placement)

    def _own_slots(self, selection: Selection) -> tuple[torch.Tensor, IntArray]:
        """`[R, most]`: slots of the chosen keys stored here, by position; `[R]`: how many."""
        mine = selection.source == self.groups.dcp.rank
        count = mine.sum(dim=1)
        most = int(count.max()) if len(count) else 0
        ids = selection.ids.masked_fill(~mine, _BEYOND).sort(dim=1).values[:, :most].long()
        used = torch.arange(most, device=ids.device) < count[:, None]
        # Places without a key read some slot, whatever it holds: they do not count.
        places = (ids + self.first_slot[:, None]).masked_fill(~used, 0)
        return self.slots[places].masked_fill(~used, 0), count.cpu().numpy()

    def _read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[r, most]` slots -> `[r, most, W]`."""
        rows = self.store.keys(layer, SlotRange(0, 0, slots.flatten()), dtype)
        return rows.view(*slots.shape, rows.shape[-1])


def _slot_table(sequences: list[LocalSequence], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of all sequences one after another, and where that of each gathered row begins."""
    first = torch.zeros(num_rows, dtype=torch.int64)
    total = 0
    for sequence in sequences:
        first[sequence.rows] = total
        total += len(sequence.slots)
    parts = [sequence.slots for sequence in sequences]
    return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.int64), first


def _without_pad_lanes(state: AttentionState, placement: Placement) -> AttentionState:
    """Lanes that hold no query head see nothing."""
    if placement.used_lanes is None or all(placement.used_lanes):
        return state
    pads = ~torch.tensor(placement.used_lanes, device=state.lse.device)
    return AttentionState(
        state.out.masked_fill(pads[:, None], 0.0), state.lse.masked_fill(pads, -torch.inf)
    )
