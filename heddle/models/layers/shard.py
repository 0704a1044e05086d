"""This rank's place among the tensor-parallel ranks, and the cut of a dimension between them.

Whole experts may be dealt to ranks instead, see `expert_group`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.comm.base import Communicator
from heddle.layout.cut import cut
from heddle.models.layers.expert_group import ExpertGroup
from heddle.models.weights.source import Span


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's view of the weight split: sums are over `tp`."""

    rank: int
    size: int
    tp: Communicator
    experts: ExpertGroup | None = None
    """Who holds whole experts; None: every expert is cut over `tp`."""

    def cut(self, count: int) -> tuple[int, int]:
        """This rank's half-open range of `count` units."""
        return cut(count, self.size, self.rank)

    def cut_experts(self, num_experts: int, inner_size: int) -> tuple[Span, Span]:
        """This rank's experts, and its range of the inner dimension of each."""
        if self.experts is None:
            return (0, num_experts), self.cut(inner_size)
        ep = self.experts.ep
        return cut(num_experts, ep.world_size, ep.rank), (0, inner_size)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's partial, same on all ranks; nothing is said in a group of one."""
        return partial if self.size == 1 else self.tp.all_reduce(partial)
