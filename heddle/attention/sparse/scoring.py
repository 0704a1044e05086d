"""Scores of the indexer: how much a query wants a key, before any attention.

    score(p, t) = sum over heads j of  weight(p, j) * max(0, query(p, j) . key(t))

A score must have the same bits on whatever rank and beside whatever other keys it is computed, or
near ties would fall differently from one layout to the next. A matrix product does not promise
that: libraries choose kernels by shape and alignment, and kernels add in different orders. So every
product here has one shape, whatever the batch: the heads of one row against a tile of keys, on
aligned copies, padded with zeros. Everything else is elementwise; heads add up pairwise in an order
that only their number fixes. That is what the tests observe on CPUs, not what a library promises.

Legend: `R` rows, `Hi` heads of the indexer, `Di` width of an index key, `L` keys.
Source: the DeepSeek-V3.2 report, "Lightning Indexer", and the model code for heads and weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

_TILE = 128  # keys of one product
_ALIGNED = 16  # elements of 64 bytes
_HELD_ELEMENTS = 1 << 23  # of products


def rows_at_once(num_heads: int, num_keys: int) -> int:
    """How many rows to score in one call, at least 1, so that the products stay small."""
    return max(1, _HELD_ELEMENTS // (num_heads * (num_keys + _TILE)))


def index_scores(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: Sequence[int]
) -> torch.Tensor:
    """Score the keys of one sequence for some of its rows.

    Args:
        query: `[R, Hi, Di]`, rotary applied.
        weights: `[R, Hi]`, every constant included.
        keys: `[L, Di]`.
        visible: row i needs the scores of its first visible[i] keys only.

    Returns:
        `[R, L]` float32, whatever the inputs are; 0 or any number where nothing was needed.
    """
    tiles = _tiles(keys)
    padded = functional.pad(query.float(), (0, -query.shape[-1] % _ALIGNED)).contiguous()
    products = torch.zeros((len(query), len(tiles), query.shape[1], _TILE), device=keys.device)
    for row, num_visible in enumerate(visible):
        for tile in range(-(-num_visible // _TILE)):
            torch.mm(padded[row], tiles[tile].t(), out=products[row, tile])
    return _weighted_sum(products, weights.float()).flatten(1)[:, : len(keys)]


def _tiles(keys: torch.Tensor) -> torch.Tensor:
    """`[ceil(L / tile), tile, Di padded]`: always the same strides, however the keys are stored."""
    num_keys, width = keys.shape
    count = -(-num_keys // _TILE)
    tiles = torch.zeros((count * _TILE, width + -width % _ALIGNED), device=keys.device)
    tiles[:num_keys, :width] = keys
    return tiles.view(count, _TILE, tiles.shape[1])


def _weighted_sum(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[R, tiles, Hi, tile]` -> `[R, tiles, tile]`; overwrites `products`."""
    parts = products.relu_().mul_(weights[:, None, :, None])
    count = parts.shape[2]
    while count > 1:
        half = (count + 1) // 2
        parts[:, :, : count - half] += parts[:, :, half:count]
        count = half
    return parts[:, :, 0]
