"""What the runner asks of a model, and what a model is built from.

Legend: `M` this rank's rows in the step, `R` rows that need logits, `E` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.attention.base import StepOps
from heddle.config.model import ModelConfig
from heddle.layout.cut import cut
from heddle.layout.heads import HeadLayout
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True, eq=False)
class GivenRows:
    """Embeddings that callers gave in place of tokens."""

    rows: torch.Tensor
    """`[n]` int64, ascending: places among the `M` rows."""
    values: torch.Tensor
    """`[n, E]`: what enters the first layer, any factor on looked-up embeddings included."""


@dataclass(frozen=True, slots=True, eq=False)
class RowInputs:
    """What a pass is told about each of its rows."""

    token_ids: torch.Tensor
    """`[M]` int64; read on the first stage alone."""
    positions: torch.Tensor
    """`[M]` int64, each row's place in its own sequence."""
    rope_lengths: torch.Tensor | None = None
    """`[M]` int64, the longest length that each row's request may reach, for rotary tables that
    depend on it; None: this model's do not.
    """
    given: GivenRows | None = None
    """Rows whose token is ignored; None: there are none."""


class Model(Protocol):
    """A decoder on one rank, or the layers of it that one pipeline stage holds."""

    def forward(
        self,
        rows: RowInputs,
        ops: StepOps,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass over the step's rows.

        Args:
            rows: tokens, positions, and what else differs from row to row.
            ops: the step's attention; called once per layer of this stage, in order.
            hidden: `[M, E]` from the stage before; None on the first stage.

        Returns:
            `[M, E]`, final norm applied on the last stage; same on all TP ranks.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, E]` rows of the last stage -> `[R, vocab_size]`, same on all TP ranks."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """All that a family needs to build itself on one rank."""

    config: ModelConfig
    heads: HeadLayout
    shard: Shard
    loader: WeightLoader
    stage: tuple[int, int] = (0, 1)
    """Place among the pipeline stages, and their number."""
    replicates_queries: bool = False
    """This rank projects the queries of its whole slice, which then need not be gathered."""

    @property
    def layer_range(self) -> tuple[int, int]:
        """Half-open range of this stage's layers; shares differ by at most one layer."""
        rank, size = self.stage
        return cut(self.config.num_layers, size, rank)

    @property
    def is_first_stage(self) -> bool:
        """This stage looks tokens up."""
        return self.stage[0] == 0

    @property
    def is_last_stage(self) -> bool:
        """This stage gives logits."""
        return self.stage[0] == self.stage[1] - 1

    @property
    def query_range(self) -> tuple[int, int]:
        """Global query heads of this rank."""
        return self.heads.query_range(self.shard.rank)

    @property
    def projected_ranges(self) -> tuple[tuple[int, int], ...]:
        """Global query heads that this rank projects, for each rank whose lanes it fills: its own,
        or those of all ranks of its slice, in their order.
        """
        if not self.replicates_queries:
            return (self.query_range,)
        size = self.heads.slice_size
        first = self.shard.rank // size * size
        return tuple(self.heads.query_range(rank) for rank in range(first, first + size))

    @property
    def num_projected_lanes(self) -> int:
        """Query-head lanes that this rank projects, pads included."""
        return len(self.projected_ranges) * self.heads.lanes

    @property
    def kv_range(self) -> tuple[int, int]:
        """Global kv heads of this rank's slice."""
        return self.heads.kv_range(self.shard.rank // self.heads.slice_size)
