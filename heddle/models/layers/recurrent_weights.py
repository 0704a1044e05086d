"""Pieces of fused checkpoint matrices that belong to one rank of a recurrent layer.

Published layers fuse projections in an order of their own, so the outputs of some heads lie in
several runs of rows. A list of spans names them in the order in which this rank wants them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.attention.recurrent.convolution import Convolution
from heddle.models.weights.loader import Piece, WeightLoader
from heddle.models.weights.source import Span


def load_spans(
    loader: WeightLoader, name: str, shape: tuple[int, ...], spans: Sequence[Span]
) -> torch.Tensor:
    """Rows of a tensor whose whole shape must be `shape`, span after span.

    Raises:
        ModelFileError: the tensor is missing or has another shape.
    """
    loader.check(name, shape)
    joined = join_spans(spans)
    sizes = [end - start for start, end in joined]
    rows = loader.zeros(sum(sizes), *shape[1:])
    targets = torch.split(rows, sizes)
    pieces = [Piece(target, span) for target, span in zip(targets, joined, strict=True)]
    loader.fill_pieces(name, shape, pieces)
    return rows


def join_spans(spans: Sequence[Span]) -> list[Span]:
    """Neighbours become one, empty ones vanish; the order stays.

    Example:
        >>> join_spans([(0, 2), (2, 5), (7, 7), (9, 10), (0, 1)])
        [(0, 5), (9, 10), (0, 1)]
    """
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return joined


def load_convolution(
    loader: WeightLoader,
    name: str,
    num_channels: int,
    kernel: int,
    spans: Sequence[Span],
    *,
    has_bias: bool = False,
) -> Convolution:
    """Channels `spans` of the depthwise convolution called `name`."""
    shape = (num_channels, 1, kernel)
    weight = load_spans(loader, f"{name}.weight", shape, spans)[:, 0].t().contiguous()
    bias = load_spans(loader, f"{name}.bias", (num_channels,), spans) if has_bias else None
    return Convolution(weight, bias)


def load_head_vector(loader: WeightLoader, name: str, num_heads: int, heads: Span) -> torch.Tensor:
    """One number per head of this rank, in float32 or wider: they enter exponentials."""
    wide = torch.promote_types(loader.dtype, torch.float32)
    return loader.load(name, (num_heads,), heads, dtype=wide)
