"""COPY rows: every PCP rank holds them. New KV is written first, then each row attends once.

Row i of a request at position p sees the first `visible_len(p)` local keys on each rank, so decode
rows, short prompts and several query tokens per request are one case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.attention.exchange.base import gather_query
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.resources import AttentionResources
from heddle.attention.state import AttentionState, concatenate
from heddle.layout.heads import HeadRun
from heddle.step.localize import RankStep


class CopyRows:
    """Attention of the COPY rows of one step."""

    def __init__(self, step: RankStep, resources: AttentionResources) -> None:
        self.step = step
        self.resources = resources
        self.keys = [resources.store.locate(part.keys) for part in step.copy_parts]
        self.visible = torch.tensor(step.copy_visible)
        self.placement = resources.placement(step, step.num_copy, is_copy=True)
        self.exchange = resources.exchange(step.plan.copy_exchange)

    def run(self, layer: int, kind: AttentionKind) -> torch.Tensor:
        """`[num_copy, h, Dv]`."""
        resources = self.resources
        query = kind.travelling_query[: self.step.num_copy]
        if self.exchange is None:
            return kind.finish(self._attend(layer, kind, query, resources.own_runs).out)
        dcp = resources.groups.dcp
        gathered = gather_query(query, self.placement, dcp, resources.groups.slice)
        local = self._attend(layer, kind, gathered, resources.gathered_runs)
        merged = self.exchange.merge(local, self.visible, self.placement, dcp)
        return kind.finish(merged.out)

    def _attend(
        self, layer: int, kind: AttentionKind, query: torch.Tensor, runs: Sequence[HeadRun]
    ) -> AttentionState:
        """Each request's rows against its own local keys."""
        states = []
        for part, slots in zip(self.step.copy_parts, self.keys, strict=True):
            stored = self.resources.store.read(layer, slots).to(query.dtype)
            key, value = kind.stored(stored)
            rows = query[part.start : part.end]
            states.append(
                self.resources.backend.attend(rows, key, value, runs, part.visible, kind.scale)
            )
        return concatenate(states)
