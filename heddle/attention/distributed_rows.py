"""Distributed rows: each lives on one PCP rank. A self part over the step's new keys meets a
context part.

    keys of a row at position p:   [0, C) cached, sharded        [C, p] new, gathered over PCP
                                   \\-- context part --/          \\-- self part, causal --/

The two key sets are disjoint and together complete, so their merge is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from heddle.attention.context import StayingContext, TravellingContext
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.resources import AttentionResources
from heddle.attention.state import AttentionState, concatenate, merge
from heddle.layout.heads import HeadRun
from heddle.step.localize import DistributedPart, RankStep


class DistributedRows:
    """Attention of the distributed rows of one step."""

    def __init__(
        self,
        step: RankStep,
        resources: AttentionResources,
        travelling: TravellingContext,
        staying: StayingContext,
    ) -> None:
        self.step = step
        self.resources = resources
        self.travelling = travelling
        self.staying = staying

    def run(self, layer: int, kind: AttentionKind, new_rows: torch.Tensor) -> torch.Tensor:
        """Attend and merge.

        Args:
            layer: index of the layer.
            kind: the layer's queries.
            new_rows: `[T_distributed, Ks, W]`, all new rows of the step in global order.
        Returns:
            `[n, h, Dv]`; zeros on pads.
        """
        query = kind.staying_query[self.step.num_copy :]
        runs = kind.staying_runs(self.resources.own_runs)
        travelled = self.travelling.run(layer, kind)
        stayed = self.staying.run(layer, kind, query, runs)
        key, value = kind.expand(new_rows)
        out = torch.zeros((*query.shape[:2], value.shape[-1]), dtype=self.resources.partial_dtype)
        for part in self.step.distributed_parts:
            if part.start == part.end:
                continue
            rows = slice(part.start, part.end)
            states = [self._self_state(query, key, value, runs, part, kind.scale)]
            if travelled is not None:
                states.append(AttentionState(travelled.out[rows], travelled.lse[rows]))
            if part.request in stayed:
                states.append(stayed[part.request])
            out[rows] = states[0].out if len(states) == 1 else merge(states, strict=False).out
        return out

    def _self_state(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: Sequence[HeadRun],
        part: DistributedPart,
        scale: float,
    ) -> AttentionState:
        """Rows of one request against its new keys, causal by position."""
        states = []
        for segment in part.segments:
            length = segment.end - segment.start
            if length == 0:
                continue
            visible = segment.first_visible + np.arange(length, dtype=np.int64)
            keys = slice(part.key_start, part.key_start + int(visible[-1]))
            rows = query[segment.start : segment.end]
            states.append(
                self.resources.backend.attend(rows, key[keys], value[keys], runs, visible, scale)
            )
        return concatenate(states)
