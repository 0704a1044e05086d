"""What the rotation means, in plain torch.

    heads [M, h + 2 Ks, D] = query | key | value
    query, key = norm?(query, key), pair (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    rows  [M, Ks, 2D]      = key | value, side by side: as a cache keeps them

Legend: `M` rows, `h` query lanes, `Ks` kv heads, `D` head width, `P` pairs, `2P <= D`.
Source: rotary embedding, arXiv 2104.09864.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from heddle.kernels.rms_norm.reference import rms_norm


class Turns(NamedTuple):
    """Cosines and sines of a step."""

    cos: torch.Tensor
    """`[M, 1, P]`."""
    sin: torch.Tensor
    """`[M, 1, P]`."""
    interleaved: bool
    """Pairs are (2j, 2j + 1), else (j, j + P)."""


class HeadNorm(NamedTuple):
    """Norm of query and key heads, before they are turned."""

    weight: torch.Tensor
    """`[h + Ks, D]`."""
    eps: float


def turn(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Turn heads; elements past the first 2P of each stay as they are.

    Args:
        x: `[M, heads, D]`.
        turns: of the rows.

    Returns:
        The shape of `x`, contiguous, pairs where they were.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = 2 * turns.cos.shape[-1]
    out[..., width:] = x[..., width:]
    is_mixed = turns.interleaved
    (x1, x2), (y1, y2) = _pairs(x[..., :width], is_mixed), _pairs(out[..., :width], is_mixed)
    torch.mul(x1, turns.cos, out=y1).addcmul_(x2, turns.sin, value=-1)
    torch.mul(x2, turns.cos, out=y2).addcmul_(x1, turns.sin)
    return out


def rotate(
    heads: torch.Tensor, num_lanes: int, turns: Turns, norm: HeadNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and turn query and key heads, and put each key beside its value.

    Args:
        heads: `[M, h + 2 Ks, D]`: query, key, then value heads.
        num_lanes: `h`.
        turns: of the rows.
        norm: of query and key heads; None: there is none.

    Returns:
        query `[M, h, D]`, rows `[M, Ks, 2D]`.
    """
    num_keys = (heads.shape[1] - num_lanes) // 2
    met = heads[:, : num_lanes + num_keys]
    turned = turn(met if norm is None else rms_norm(met, norm.weight, norm.eps), turns)
    rows = torch.cat((turned[:, num_lanes:], heads[:, num_lanes + num_keys :]), dim=-1)
    return turned[:, :num_lanes], rows


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
