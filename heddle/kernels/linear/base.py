"""What loaders and products need of a weight that is packed for a kernel.

Legend: `K` inputs, `N` outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

Span = tuple[int, int]
"""A half-open range."""


class PackedWeight(Protocol):
    """A matrix in a form of its own."""

    @property
    def num_outputs(self) -> int:
        """`N`."""
        ...

    @property
    def num_inputs(self) -> int:
        """`K`."""
        ...

    def columns(self, outputs: torch.Tensor) -> torch.Tensor:
        """`[m]` places of outputs -> their weights `[m, K]`."""
        ...

    def matrix(self) -> torch.Tensor:
        """`[K, N]`, a copy in plain order."""
        ...

    @property
    def is_meta(self) -> bool:
        """It has a size and no memory."""
        ...


@runtime_checkable
class FillableWeight(PackedWeight, Protocol):
    """One that plain numbers can fill."""

    def write(self, first: int, rows: torch.Tensor, start: int = 0) -> None:
        """Fill outputs from `first` on, and of each the inputs from `start` on.

        Args:
            first: in `[0, N]`.
            rows: `[n, k]`, in any dtype.
            start: in `[0, K]`.
        """
        ...


Weight = torch.Tensor | PackedWeight
"""Of a product: `[K, N]`, plain or packed."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Weights of several forms whose outputs lie side by side."""

    parts: tuple[PackedWeight, ...]

    @property
    def num_outputs(self) -> int:
        """`N` of all."""
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_inputs(self) -> int:
        """`K`, of each."""
        return self.parts[0].num_inputs

    def columns(self, outputs: torch.Tensor) -> torch.Tensor:
        """`[m]` places of outputs -> their weights `[m, K]`."""
        return self.matrix().t()[outputs]

    def matrix(self) -> torch.Tensor:
        """`[K, N]`, a copy in plain order."""
        return torch.cat([part.matrix() for part in self.parts], 1)

    @property
    def is_meta(self) -> bool:
        """It has a size and no memory."""
        return self.parts[0].is_meta


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """A range of a packed weight that is about to be filled; indexed like `[N, K]`."""

    weight: PackedWeight
    outputs: Span
    inputs: Span
    kind: str = ""
    """How a file packs what fills it; empty: numbers do."""

    @classmethod
    def whole(cls, weight: PackedWeight, kind: str = "") -> PackedPart:
        """All of it."""
        return cls(weight, (0, weight.num_outputs), (0, weight.num_inputs), kind)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> PackedPart:
        """A range of this range; steps of 1."""
        slices = index if isinstance(index, tuple) else (index,)
        spans = [self.outputs, self.inputs]
        for place, cut in enumerate(slices):
            first, last = spans[place]
            start, stop, _ = cut.indices(last - first)
            spans[place] = (first + start, first + max(start, stop))
        return PackedPart(self.weight, spans[0], spans[1], self.kind)

    def copy_(self, rows: torch.Tensor) -> None:
        """Fill it with `[n, k]`."""
        assert rows.shape == self.shape, f"{tuple(rows.shape)} for {self.shape}"
        assert isinstance(self.weight, FillableWeight), "else its file's own blocks do"
        self.weight.write(self.outputs[0], rows, self.inputs[0])

    @property
    def is_meta(self) -> bool:
        """It has a size and no memory."""
        return self.weight.is_meta

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self.outputs[1] - self.outputs[0], self.inputs[1] - self.inputs[0]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentsPart:
    """As `PackedPart`, of `Segments`: a slice must lie within one of them."""

    parts: tuple[PackedPart, ...]

    def __getitem__(self, index: slice) -> PackedPart:
        """Outputs of one part."""
        start = 0
        for part in self.parts:
            size = part.shape[0]
            if index.start >= start and index.stop <= start + size:
                return part[index.start - start : index.stop - start]
            start += size
        raise IndexError(f"outputs {index.start} to {index.stop} lie in no one part")
