"""Matrix products on one rank's slice of a weight.

A *column* cut gives each rank some of the outputs; a *row* cut gives each rank some of the inputs,
so that its result is a part of a sum. A column cut followed by a row cut needs one sum over ranks
and nothing in between.

Plain weights are laid out `[in, out]`, as the transpose of the checkpoint's. A product of one row
then runs along the outputs and reads memory once, in order; on CPUs that made one decode row up to
1.7 times as fast as `[out, in]` and a prefill chunk 1.15 times (`docs/log.md`). Compiled kernels
take weights in panels instead, see `heddle.kernels.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heddle.attention.base import StepOps
from heddle.kernels.linear.base import SegmentsPart, Weight
from heddle.kernels.linear.reference import linear
from heddle.kernels.registry import LinearKernel
from heddle.models.adapters.slots import AdapterSite, AdapterSlots
from heddle.models.layers.shard import Shard
from heddle.models.weights.forms import MatrixPart, Target, weight_of
from heddle.models.weights.loader import Piece, WeightLoader
from heddle.models.weights.source import Span


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight + bias`."""

    weight: Weight  # [in, out] of this rank
    bias: torch.Tensor | None = None  # [out]
    adapters: AdapterSlots | None = None
    """Low-rank updates of some rows; None: it takes none."""
    product: LinearKernel = linear
    """Takes the weight in its form."""

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        adapters: AdapterSlots | None = None,
        loader: WeightLoader | None = None,
    ) -> Linear:
        """From a matrix as checkpoints hold it, `[out, in]`.

        Args:
            weight: copied, unless its transpose is contiguous.
            bias: `[out]`.
            adapters: of its rows.
            loader: packs the weight for its kernels; None: it stays plain.
        """
        if loader is None:
            return cls(weight.t().contiguous(), bias, adapters)
        return cls(loader.pack(weight), bias, adapters, loader.kernels.linear)

    def __call__(self, x: torch.Tensor, ops: StepOps | None = None) -> torch.Tensor:
        """`[M, in]` -> `[M, out]`.

        Args:
            x: rows of the step.
            ops: the step; needed where the product takes adapters.
        """
        out = self.product(x, self.weight, self.bias)
        if self.adapters is not None and not self.adapters.is_empty:
            assert ops is not None, "a block passes the step to products that take adapters"
            if ops.adapters is not None:
                self.adapters.add(out, x, ops.adapters)
        return out


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Some outputs of one checkpoint matrix, and how much room they get in a fused one."""

    name: str
    """Without `.weight`; parts of one checkpoint matrix share it, their size and their bias."""
    size: int
    """Outputs of the whole matrix."""
    span: Span
    """Outputs that this rank computes, counted from the first of the whole matrix."""
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
    """One product for several matrices that share their input; outputs lie side by side.

    Parts of one checkpoint matrix are read together.
    """
    for part in parts:
        loader.check(f"{part.name}.weight", (part.size, num_inputs))
    rooms = [MatrixPart(f"{part.name}.weight", part.room * len(part.spans)) for part in parts]
    num_outputs = sum(part.num_outputs for part in rooms)
    weight = loader.matrix(rooms, num_inputs)
    bias = loader.zeros(num_outputs) if any(part.has_bias for part in parts) else None
    for name, placed in _by_matrix(parts).items():
        shape, has_bias = (placed[0][1].size, num_inputs), placed[0][1].has_bias
        loader.fill_pieces(f"{name}.weight", shape, _all_pieces(weight, placed))
        if bias is not None and has_bias:
            loader.fill_pieces(f"{name}.bias", shape[:1], _all_pieces(bias, placed))
    sites = [_site(name, placed, num_inputs) for name, placed in _by_matrix(parts).items()]
    adapters = loader.take_adapters(sites)
    return Linear(weight_of(weight), bias, adapters, loader.kernels.linear)


def _site(name: str, placed: Sequence[tuple[int, ColumnPart]], num_inputs: int) -> AdapterSite:
    """Where the outputs of a checkpoint matrix lie among those of the product."""
    return AdapterSite(
        module=name,
        num_outputs=placed[0][1].size,
        num_inputs=num_inputs,
        inputs=(0, num_inputs),
        pieces=tuple(
            (start + index * part.room, span)
            for start, part in placed
            for index, span in enumerate(part.spans)
        ),
    )


def _by_matrix(parts: Sequence[ColumnPart]) -> dict[str, list[tuple[int, ColumnPart]]]:
    """Name of a checkpoint matrix -> its parts, each with the output at which it starts."""
    placed: dict[str, list[tuple[int, ColumnPart]]] = {}
    start = 0
    for part in parts:
        placed.setdefault(part.name, []).append((start, part))
        start += part.room * len(part.spans)
    return placed


def _all_pieces(target: Target, placed: Sequence[tuple[int, ColumnPart]]) -> list[Piece]:
    return [piece for start, part in placed for piece in _pieces(target, start, part)]


def _pieces(target: Target, start: int, part: ColumnPart) -> list[Piece]:
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
    loader.check(f"{name}.weight", (num_outputs, num_inputs))
    weight = loader.matrix([MatrixPart(f"{name}.weight", num_outputs)], num_inputs, span)
    assert not isinstance(weight, SegmentsPart), "it has one part"
    loader.fill(weight, f"{name}.weight", (num_outputs, num_inputs), cols=span)
    site = AdapterSite(
        module=name,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        inputs=span,
        pieces=((0, (0, num_outputs)),),
    )
    adapters = loader.take_adapters([site])
    bias = loader.load(f"{name}.bias", (num_outputs,)) if has_bias else None
    # One rank adds the bias, else the sum would hold it once per rank.
    own = bias if shard.rank == 0 else None
    return Linear(weight_of(weight), own, adapters, loader.kernels.linear)
