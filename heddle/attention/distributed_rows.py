"""Distributed rows: each lives on one PCP rank. A self part over the step's new keys meets a
context part.

    keys of a row at position p:   [0, C) cached, sharded        [C, p] new, gathered over PCP
                                   \\-- context part --/          \\-- self part, causal --/

The two key sets are disjoint and together complete, so their merge is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from heddle.attention.context import TravellingContext
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.resources import AttentionResources
from heddle.attention.state import AttentionState, with_sinks
from heddle.attention.staying_context import StayingContext
from heddle.attention.views import attend, joined, visible_of
from heddle.step.local_group import ClassStep
from heddle.step.localize import RankStep


class DistributedRows:
    """Attention of the rows of one class in one step, in the layers of one cache group."""

    def __init__(self, step: RankStep, rows: ClassStep, resources: AttentionResources) -> None:
        self.rows = rows
        self.resources = resources
        self.travelling = TravellingContext(step, rows, resources)
        self.staying = StayingContext(rows, resources)
        self.segments = [
            (
                segment,
                [(slice(view.start, view.end), visible_of(view.ranges)) for view in segment.views],
            )
            for segment in rows.segments
        ]

    def run(
        self, layer: int, kind: AttentionKind, new_keys: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Attend and merge.

        Args:
            layer: index of the layer.
            kind: the layer's queries.
            new_keys: expanded keys and values of the step's distributed rows, as far as rows of
                this rank may see them, in global order.
        Returns:
            `[n, h, Dv]`; zeros on pads.
        """
        query = kind.staying_query[self.rows.start : self.rows.start + self.rows.num_rows]
        runs = kind.staying_runs(self.resources.own_runs)
        travelled = self.travelling.run(layer, kind)
        stayed = self.staying.run(layer, kind, query, runs)
        width = new_keys[1].shape[-1]
        out = torch.zeros((*query.shape[:2], width), dtype=self.resources.partial_dtype)
        for segment, views in self.segments:
            rows = slice(segment.start, segment.end)
            states = [
                attend(
                    self.resources.backend,
                    kind,
                    query[rows],
                    (new_keys[0][keys], new_keys[1][keys]),
                    runs,
                    visible,
                )
                for keys, visible in views
            ]
            states += _context_of(rows, travelled, stayed)
            state = joined(states)
            out[rows] = (state if kind.sinks is None else with_sinks(state, kind.sinks)).out
        return out


def _context_of(
    rows: slice, travelled: AttentionState | None, stayed: AttentionState | None
) -> Iterator[AttentionState]:
    """The context states of some rows, as far as the plan has any."""
    for state in (travelled, stayed):
        if state is not None:
            yield AttentionState(state.out[rows], state.lse[rows])
