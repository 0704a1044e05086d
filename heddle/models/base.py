"""What the runner asks of a model, and what a model is built from.

Legend: `M` this rank's rows in the step, `R` rows that need logits, `E` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.attention.base import StepAttention
from heddle.config.model import ModelConfig
from heddle.layout.heads import HeadLayout
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader


class Model(Protocol):
    """A decoder on one rank."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """One pass over the step's rows.

        Args:
            token_ids: `[M]` int64.
            positions: `[M]` int64, each row's place in its own sequence.
            attention: the step's attention; called once per layer, in order.

        Returns:
            `[M, E]`, final norm applied; same on all TP ranks.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, E]` rows of `forward` -> `[R, vocab_size]`, same on all TP ranks."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """All that a family needs to build itself on one rank."""

    config: ModelConfig
    heads: HeadLayout
    shard: Shard
    loader: WeightLoader

    @property
    def query_range(self) -> tuple[int, int]:
        """Global query heads of this rank."""
        return self.heads.query_range(self.shard.rank)

    @property
    def kv_range(self) -> tuple[int, int]:
        """Global kv heads of this rank's slice."""
        return self.heads.kv_range(self.shard.rank // self.heads.slice_size)
