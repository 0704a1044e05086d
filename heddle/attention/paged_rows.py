"""Rows as a backend meets them that reads stored rows in place, block by block.

All requests of a step are one plan: the backend sees how much there is to read in all, and shares
it out. A row may meet several ranges of keys (its window, the first tokens, pieces of its context).
Ranges that follow each other become one; for what is left there is one plan more, and states merge.

Legend: `R` rows, `S` sequences, `B` blocks of the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from heddle.attention.backends.base import PagedBackend
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.resources import AttentionResources
from heddle.attention.state import AttentionState
from heddle.attention.storage import KVStore
from heddle.attention.views import joined
from heddle.kernels.paged_decode.plan import PagedPlan
from heddle.layout.heads import HeadRun
from heddle.step.views import LocalRange, Ranges

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowView:
    """Some rows, and stored keys of one sequence that they meet."""

    rows: slice | IntArray
    keys: LocalRange
    ranges: Ranges
    """Relative to the first of `keys`."""


class _Layer:
    """At most one range for each row."""

    def __init__(self, num_rows: int) -> None:
        self.table_of_row = np.zeros(num_rows, dtype=np.int64)
        self.first = np.zeros(num_rows, dtype=np.int64)
        self.end = np.zeros(num_rows, dtype=np.int64)

    def take(self, view: RowView, table: int) -> bool:
        """Add a view, unless one of its rows has keys that do not end where these begin."""
        rows = view.rows
        first = view.keys.start + view.ranges.first
        end = view.keys.start + view.ranges.end
        meets, has_some = first < end, self.first[rows] < self.end[rows]
        follows = (self.end[rows] == first) & (self.table_of_row[rows] == table)
        if bool((meets & has_some & ~follows).any()):
            return False
        self.first[rows] = np.where(meets & ~has_some, first, self.first[rows])
        self.end[rows] = np.where(meets, end, self.end[rows])
        self.table_of_row[rows] = np.where(meets, table, self.table_of_row[rows])
        return True


def paged_plans(
    views: Sequence[RowView], num_rows: int, block_size: int, num_tables: int = 1
) -> list[PagedPlan] | None:
    """Plans that together hold every key that the rows meet, each of them once.

    Args:
        views: disjoint in what a row meets.
        num_rows: `R`; rows of no view meet nothing.
        block_size: rows of a block.
        num_tables: block tables at least; those of no view are block 0.

    Returns:
        At least one plan; None where single stored rows are picked, which no run of blocks says.
    """
    if any(view.keys.picked is not None for view in views):
        return None
    tables: dict[int, int] = {}
    layers = [_Layer(num_rows)]
    for view in views:
        table = tables.setdefault(id(view.keys.block_table), len(tables))
        if not any(layer.take(view, table) for layer in layers):
            layers.append(_Layer(num_rows))
            layers[-1].take(view, table)
    blocks = _stacked(views, tables, block_size, num_tables)
    return [
        PagedPlan(blocks, layer.table_of_row, layer.first, layer.end, block_size)
        for layer in layers
    ]


def _stacked(
    views: Sequence[RowView], number_of: dict[int, int], block_size: int, num_tables: int
) -> IntArray:
    """`[S, B]`, as far as any row meets keys."""
    used = [0] * max(len(number_of), num_tables)
    for view in views:
        number = number_of[id(view.keys.block_table)]
        used[number] = max(used[number], -(-view.keys.end // block_size))
    tables = np.zeros((len(used), max(used)), dtype=np.int64)
    for view in views:
        number = number_of[id(view.keys.block_table)]
        tables[number, : used[number]] = view.keys.block_table[: used[number]]
    return tables


class PagedRows:
    """Rows of one step that meet stored keys in place, in every layer of a cache group."""

    def __init__(self, plans: Sequence[PagedPlan], backend: PagedBackend, store: KVStore) -> None:
        self.plans = plans
        self.backend = backend
        self.store = store

    @classmethod
    def of(
        cls,
        views: Sequence[RowView],
        num_rows: int,
        resources: AttentionResources,
        num_tables: int = 1,
    ) -> PagedRows | None:
        """None where rows must be met request by request, read beforehand; see `paged_plans`."""
        backend, store = resources.backend, resources.store
        if not isinstance(backend, PagedBackend):
            return None
        plans = paged_plans(views, num_rows, store.block_size, num_tables)
        return None if plans is None else cls(plans, backend, store)

    def attend(
        self, layer: int, kind: AttentionKind, query: torch.Tensor, runs: Sequence[HeadRun]
    ) -> AttentionState:
        """State of every row over all stored keys that it meets.

        Args:
            layer: index of the layer.
            kind: of the layer.
            query: `[R, h, Dq]`, against stored rows.
            runs: lanes -> stored kv heads.
        """
        rows, row_format = self.store.layer(layer), self.store.codec.row_format
        return joined(
            [
                self.backend.attend_paged(
                    query,
                    rows,
                    plan,
                    kind.widths,
                    runs,
                    kind.scale,
                    kind.softcap,
                    row_format,
                )
                for plan in self.plans
            ]
        )
