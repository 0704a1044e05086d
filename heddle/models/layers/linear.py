"""Matrix products on one rank's slice of a weight.

A *column* cut gives each rank some of the outputs; a *row* cut gives each rank some of the inputs,
so that its result is a part of a sum. A column cut followed by a row cut needs one sum over ranks
and nothing in between.

Weights are laid out `[in, out]`, as the transpose of the checkpoint's. A product of one row then
runs along the outputs and reads memory once, in order; on CPUs that made one decode row up to 1.7
times as fast as `[out, in]` and a prefill chunk 1.15 times (`docs/log.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import Piece, WeightLoader
from heddle.models.weights.source import Span


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight + bias`."""

    weight: torch.Tensor  # [in, out] of this rank
    bias: torch.Tensor | None = None  # [out]

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """From a matrix as checkpoints hold it, `[out, in]`."""
        return cls(weight.t().contiguous(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[M, in]` -> `[M, out]`."""
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Some outputs of one checkpoint matrix, and how much room they get in a fused one."""

    name: str
    """Without `.weight`."""
    size: int
    """Outputs of the whole matrix."""
    span: Span
    """Outputs that this rank computes."""
    room: int
    """Outputs in the fused result, at least the span; the rest are zeros."""
    has_bias: bool = False
    more: tuple[Span, ...] = ()
    """Further spans of the same matrix; each gets as much room."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans."""
        return (self.span, *self.more)


def load_columns(loader: WeightLoader, parts: Sequence[ColumnPart], num_inputs: int) -> Linear:
    """One product for several matrices that share their input; outputs lie side by side."""
    for part in parts:
        loader.check(f"{part.name}.weight", (part.size, num_inputs))
    weight = loader.zeros(sum(part.room * len(part.spans) for part in parts), num_inputs)
    bias = loader.zeros(weight.shape[0]) if any(part.has_bias for part in parts) else None
    start = 0
    for part in parts:
        shape = (part.size, num_inputs)
        loader.fill_pieces(f"{part.name}.weight", shape, _pieces(weight, start, part))
        if bias is not None and part.has_bias:
            loader.fill_pieces(f"{part.name}.bias", shape[:1], _pieces(bias, start, part))
        start += part.room * len(part.spans)
    return Linear.of(weight, bias)


def _pieces(target: torch.Tensor, start: int, part: ColumnPart) -> list[Piece]:
    """Where the spans of a part go, from output `start` on."""
    places = range(start, start + part.room * len(part.spans), part.room)
    return [
        Piece(target[place : place + end - first], (first, end))
        for place, (first, end) in zip(places, part.spans, strict=True)
    ]


def load_rows(
    loader: WeightLoader,
    shard: Shard,
    name: str,
    num_outputs: int,
    num_inputs: int,
    span: Span,
    *,
    has_bias: bool = False,
) -> Linear:
    """A matrix of which this rank holds the inputs in `span`; all ranks' results add up."""
    weight = loader.load(f"{name}.weight", (num_outputs, num_inputs), cols=span)
    if not has_bias:
        return Linear.of(weight)
    bias = loader.load(f"{name}.bias", (num_outputs,))
    # One rank adds the bias, else the sum would hold it once per rank.
    return Linear.of(weight, bias if shard.rank == 0 else None)
