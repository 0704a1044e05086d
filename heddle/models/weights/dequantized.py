"""A source that shows quantised tensors as plain ones.

Families ask for `X.weight` and get its slices as float32. Of what it is made (codes, scales,
zero points) is the business of a `StoredTensor`. Tensors that are not quantised pass through.

    weight[i, j] = (code[i, j] - zero[i, j]) * scale[i, j]

where zero and scale are one number per block of the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.models.weights.numbers import Grid, Numbers
from heddle.models.weights.source import PrefetchingSource, Span, StoredSource

# Of activations and the cache while serving; weights do not depend on them.
_UNUSED = re.compile(
    r".*[._](activation_scale|input_scale(_ub)?|(input|output)_zero_point|input_global_scale"
    r"|output_scale|[qkv]_scale|[qkv]_zero_point)"
)


class StoredTensor(Protocol):
    """A tensor made of others."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model asks for it."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Names in the file."""
        ...

    def read(self, spans: tuple[Span, ...]) -> torch.Tensor:
        """A slice as float32, none of whose ranges is empty; one range per dimension."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineMatrix:
    """A `StoredTensor` `[n, m]` of codes, scales and perhaps zero points."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    codes: Numbers
    scales: Grid
    zeros: Grid | None = None

    def read(self, spans: tuple[Span, ...]) -> torch.Tensor:
        """`[rows, cols]` float32."""
        rows, cols = spans
        values = self.codes.read(rows, cols).to(torch.float32, copy=True)
        if self.zeros is not None:
            values.sub_(self.zeros.at(rows, cols))
        return values.mul_(self.scales.at(rows, cols))


class DequantizedSource:
    """A `WeightSource` over the files of a quantised checkpoint.

    Args:
        source: the files.
        tensors: quantised tensors, by the name that a model asks for.
    """

    def __init__(self, source: StoredSource, tensors: Mapping[str, StoredTensor]) -> None:
        self._source = source
        self._tensors = dict(tensors)
        parts = {part for tensor in tensors.values() for part in tensor.parts}
        self._plain = frozenset(
            name for name in source.names() if name not in parts and not _UNUSED.fullmatch(name)
        )

    def names(self) -> tuple[str, ...]:
        """All tensor names, those of quantised tensors as a model asks for them."""
        return (*self._tensors, *sorted(self._plain))

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        tensor = self._tensors.get(name)
        return self._source.shape(name) if tensor is None else tensor.shape

    def location(self, name: str) -> str:
        """The file, and the names of a tensor's parts in it."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return self._source.location(name)
        return f"{self._source.location(tensor.parts[0])} (there {', '.join(tensor.parts)})"

    def read(
        self,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        depth: Span | None = None,
    ) -> torch.Tensor:
        """A slice of a tensor, as float32 if it is quantised; see `WeightSource.read`."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return self._source.read(name, rows, cols, depth)
        spans = tuple(
            span or (0, size) for size, span in zip(tensor.shape, (rows, cols, depth), strict=False)
        )
        if any(first >= last for first, last in spans):
            return torch.empty([max(0, last - first) for first, last in spans])
        return tensor.read(spans)

    def prefetch(self, name: str, rows: Span | None = None) -> None:
        """Start reading rows from disk, in the background, where they are stored as rows."""
        if name in self._plain and isinstance(self._source, PrefetchingSource):
            self._source.prefetch(name, rows)
