"""Token embedding and logits, with the vocabulary cut over ranks.

Rank i holds ids `[floor(n*i/tp), floor(n*(i+1)/tp))`. A lookup sums over ranks, all but one of
which give zeros; logits are gathered, each rank's slice padded to the largest, then trimmed.

The matrix lies `[E, ids]`, plain or packed, which the product for the logits reads in order; a
lookup picks columns, so that tied weights need no second copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from heddle.kernels.linear.base import SegmentsPart, Weight
from heddle.kernels.linear.reference import linear
from heddle.kernels.registry import LinearKernel
from heddle.layout.cut import cut
from heddle.models.layers.shard import Shard
from heddle.models.weights.forms import MatrixPart, weight_of
from heddle.models.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's ids of an embedding or of the output matrix."""

    weight: Weight  # [E, ids of this rank]
    vocab_size: int
    shard: Shard
    product: LinearKernel = linear
    """Takes the weight in its form."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden rows of tokens.

        Args:
            token_ids: `[M]` int64, each in `[0, vocab_size)`.

        Returns:
            `[M, E]`, same on all ranks.
        """
        if self.shard.size == 1:
            return self._rows(token_ids)
        start, end = self.shard.cut(self.vocab_size)
        is_elsewhere = (token_ids < start) | (token_ids >= end)
        rows = self._rows((token_ids - start).masked_fill_(is_elsewhere, 0))
        return self.shard.sum(rows.masked_fill_(is_elsewhere[:, None], 0))

    def _rows(self, local_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, torch.Tensor):
            return self.weight.index_select(1, local_ids).t().contiguous()
        return self.weight.columns(local_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token.

        Args:
            hidden: `[R, E]`, final norm applied.

        Returns:
            `[R, vocab_size]`, same on all ranks.
        """
        local = self.product(hidden, self.weight)
        size = self.shard.size
        if size == 1:
            return local
        largest = -(-self.vocab_size // size)
        padded = functional.pad(local, (0, largest - local.shape[1]))
        gathered = self.shard.tp.all_gather(padded)  # [tp, R, largest]
        spans = [cut(self.vocab_size, size, rank) for rank in range(size)]
        return torch.cat([gathered[i, :, : end - start] for i, (start, end) in enumerate(spans)], 1)


def load_vocabulary(
    loader: WeightLoader, shard: Shard, name: str, vocab_size: int, hidden_size: int
) -> VocabularyShard:
    """Load a rank's rows of the matrix called `name`."""
    first, last = shard.cut(vocab_size)
    loader.check(f"{name}.weight", (vocab_size, hidden_size))
    weight = loader.matrix([MatrixPart(f"{name}.weight", last - first)], hidden_size)
    assert not isinstance(weight, SegmentsPart), "it has one part"
    loader.fill(weight, f"{name}.weight", (vocab_size, hidden_size), (first, last))
    return VocabularyShard(weight_of(weight), vocab_size, shard, loader.kernels.linear)
