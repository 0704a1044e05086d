"""RMS norm of queries and keys over their whole width, whose heads lie on several ranks.

    query / sqrt(mean over all query channels of query^2 + eps) * weight, keys alike

A head cannot be normed from itself alone: each rank adds up the squares of its own heads, and one
sum over TP of `[M, 2]`, queries and keys, completes them. Ranks of a slice hold copies of its kv
heads and some hold queries of others; each head is counted once, on one rank.

Legend: `M` rows, `h` query-head lanes that this rank projects, `Ks` kv heads of its slice, `D` head
width.

Source: OLMo 2, arXiv 2501.00656, and its model code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.models.base import BuildContext
from heddle.models.layers.shard import Shard


@dataclass(frozen=True, slots=True)
class WidthNorm:
    """The norm of one rank's query and key heads."""

    weight: torch.Tensor  # [h + Ks, D], float32 or wider
    eps: float
    counted: torch.Tensor  # [h + Ks, 2], 1 / (channels of the side) where this rank counts a head
    side: torch.Tensor  # [h + Ks] int64, 0 query, 1 key
    shard: Shard

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """`[M, h + Ks, D]` -> the same shape and dtype."""
        wide = heads.to(self.weight.dtype)
        means = self.shard.sum(wide.square().sum(-1) @ self.counted)
        scale = (means + self.eps).rsqrt()
        return (wide * scale[:, self.side, None] * self.weight).to(heads.dtype)


def load_width_norm(context: BuildContext, name: str) -> WidthNorm:
    """Load the norms `q_norm` and `k_norm` of the attention block called `name`."""
    config, loader = context.config, context.loader
    first_kv, last_kv = context.kv_range
    sides = (("q", config.num_query_heads), ("k", config.num_kv_heads))
    wide = torch.promote_types(loader.dtype, torch.float32)
    query, key = (
        loader.load(f"{name}.{side}_norm.weight", (count * config.head_dim,), dtype=wide).view(
            count, config.head_dim
        )
        for side, count in sides
    )
    lanes = query.new_zeros(context.num_projected_lanes, config.head_dim)
    for place, (first, last) in enumerate(context.projected_ranges):
        start = place * context.heads.lanes
        lanes[start : start + last - first] = query[first:last]
    side = torch.zeros(len(lanes) + last_kv - first_kv, dtype=torch.int64, device=loader.device)
    side[len(lanes) :] = 1
    return WidthNorm(
        weight=torch.cat([lanes, key[first_kv:last_kv]]),
        eps=config.rms_norm_eps,
        counted=_counted(context).to(query),
        side=side,
        shard=context.shard,
    )


def _counted(context: BuildContext) -> torch.Tensor:
    """`[h + Ks, 2]`: shares of the heads that this rank counts.

    A rank counts its own query heads. A kv head is counted by the first rank of the first slice
    that holds it, since neighbouring slices may share one.
    """
    config, heads, rank = context.config, context.heads, context.shard.rank
    slice_index, place = divmod(rank, heads.slice_size)
    first_kv, last_kv = context.kv_range
    lanes, num_lanes = heads.lanes, context.num_projected_lanes
    counted = torch.zeros(num_lanes + last_kv - first_kv, 2, dtype=torch.float64)
    start = place * lanes if context.replicates_queries else 0
    counted[start : start + lanes, 0] = 1 / (config.num_query_heads * config.head_dim)
    if place == 0:
        seen = heads.kv_range(slice_index - 1)[1] if slice_index > 0 else 0
        own = num_lanes + max(seen - first_kv, 0)
        counted[own:, 1] = 1 / (config.num_kv_heads * config.head_dim)
    return counted
