"""RMS norm over groups of heads, whose heads may lie on several ranks.

    x / sqrt(mean over the group's channels of x^2 + eps) * weight

Each rank adds up the squares of its own heads, group by group; where a group crosses ranks one sum
over TP of `[M, G]` completes them.

Legend: `M` rows, `h` heads of this rank, `V` width of a head, `G` groups of the whole layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class HeadGroupNorm:
    """One rank's heads of the norm."""

    weight: torch.Tensor  # [h, V], float32 or wider
    eps: float
    group_of_head: torch.Tensor  # [h] int64, groups of the whole layer
    num_groups: int
    group_width: int
    """Channels of a group, on all ranks together."""
    shard: Shard | None
    """Whom to sum with; None: no group crosses ranks."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[M, h, V]` in the dtype of the weight -> `[M, h, V]`, a fresh tensor."""
        squares = x.new_zeros(len(x), self.num_groups)
        squares.index_add_(1, self.group_of_head, x.square().sum(-1))
        if self.shard is not None:
            squares = self.shard.sum(squares)
        scale = (squares / self.group_width + self.eps).rsqrt()
        return x * scale[:, self.group_of_head, None] * self.weight


def load_head_group_norm(
    loader: WeightLoader, shard: Shard, layout: RecurrentLayout, name: str, eps: float
) -> HeadGroupNorm:
    """Load a rank's part of the norm called `name`."""
    config, (first, last) = layout.config, layout.head_range(shard.rank)
    width, heads_per_group = config.value_dim, config.num_heads // config.norm_groups
    wide = torch.promote_types(loader.dtype, torch.float32)
    span = (first * width, last * width)
    weight = loader.load(f"{name}.weight", (config.num_heads * width,), span, dtype=wide)
    heads = torch.arange(first, last, device=loader.device)
    return HeadGroupNorm(
        weight=weight.view(last - first, width),
        eps=eps,
        group_of_head=heads // heads_per_group,
        num_groups=config.norm_groups,
        group_width=heads_per_group * width,
        shard=shard if layout.num_norm_sums else None,
    )
