"""The best k keys of a row, by score descending and then id ascending, when keys are sharded.

An id is a global position. Every rank keeps the best of its own keys; the best of all lists are the
best of all keys, because a key that loses to k others on its own rank loses to them everywhere:

    scores of rank 0's keys --best k--> list 0 \\
                                                gather, best k of N lists --> the same on all ranks
    scores of rank 1's keys --best k--> list 1 /

The order is total (ids are unique), so the choice is the same for every way to shard the keys, ties
included. Attending to the union of the lists instead would attend to too many keys.

Legend: `R` rows, `L` keys on this rank, `K` places of a list, `N` lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

NO_ID = -1
"""Fills places of a list that hold no key."""
_BEYOND = 2**31 - 1
"""Sorts behind every id."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The best keys of one rank, best first; unused places hold (-inf, `NO_ID`)."""

    scores: torch.Tensor
    """`[R, K]` float32, or `[N, R, K]` after a gather."""
    ids: torch.Tensor
    """The same shape, int32: as float32 they would be wrong above 2**24."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The chosen keys of each row, best first; the same on all ranks."""

    ids: torch.Tensor
    """`[R, K]` int32, `NO_ID` in unused places."""
    source: torch.Tensor
    """`[R, K]` int64: the list that held the key, so the rank that stores it; -1 if unused."""

    def seen(self, num_lists: int) -> torch.Tensor:
        """Bool `[N, R]`: whether a rank stores a chosen key of a row."""
        ranks = torch.arange(num_lists, device=self.source.device)
        return (self.source == ranks[:, None, None]).any(dim=-1)


def local_top_k(
    scores: torch.Tensor, ids: torch.Tensor, visible: torch.Tensor, width: int
) -> Candidates:
    """The best min(width, visible) keys of each row among those of this rank.

    Args:
        scores: `[R, L]` float32; what lies at or beyond `visible` is not read. NaN ranks first, so
            that a broken key breaks its row instead of vanishing.
        ids: `[L]` int32, ascending.
        visible: `[R]`: row i sees the first visible[i] keys.
        width: `K`, places of a list.
    """
    num_rows, num_keys = scores.shape
    best_scores = scores.new_full((num_rows, width), -math.inf)
    best_ids = ids.new_full((num_rows, width), NO_ID)
    kept = min(width, num_keys)
    place = torch.arange(num_keys, device=scores.device)
    # Adding 0 makes -0 to +0: sorts on some devices tell them apart. Stable: lower ids first, and
    # hidden keys, which lie behind the visible ones, stay behind those that scored -inf.
    ranked = (scores + 0.0).masked_fill(place >= visible[:, None], -math.inf)
    found, order = (part[:, :kept] for part in ranked.sort(dim=1, descending=True, stable=True))
    used = place[:kept] < visible[:, None]
    best_scores[:, :kept] = found.masked_fill(~used, -math.inf)
    best_ids[:, :kept] = ids[order].masked_fill(~used, NO_ID)
    return Candidates(best_scores, best_ids)


def global_top_k(gathered: Candidates, top_k: int) -> Selection:
    """The best of all lists.

    Args:
        gathered: `[N, R, K]`, every rank's candidates in group order.
        top_k: keys that a row attends to, at most.

    Returns:
        `min(top_k, N * K)` places per row.
    """
    width = gathered.ids.shape[2]
    scores, ids = (part.movedim(0, 1).flatten(1) for part in (gathered.scores, gathered.ids))
    # Sort by the second key first: a stable sort by the first one then keeps it among ties.
    by_id = ids.masked_fill(ids == NO_ID, _BEYOND).sort(dim=1)
    by_score = scores.gather(1, by_id.indices).sort(dim=1, descending=True, stable=True)
    chosen = by_score.indices[:, :top_k]
    found = by_id.values.gather(1, chosen)
    source = by_id.indices.gather(1, chosen) // width
    unused = found == _BEYOND
    return Selection(found.masked_fill(unused, NO_ID), source.masked_fill(unused, -1))
