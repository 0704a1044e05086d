"""Between rows as a model computes them and rows as a cache keeps them.

New rows are encoded once, before anybody attends to them: what this step sees of them is what a
later step, another chunk or another request will read. So neither the length of a chunk nor a hit
in the prefix cache changes a result.

Legend: `W` elements of a row, `W'` elements of a stored row.
"""

from __future__ import annotations

from typing import Protocol

import torch

from heddle.attention.quantized_rows import QuantizedRows
from heddle.kernels.registry import Kernels
from heddle.layout.cache_rows import RowFormat


class RowCodec(Protocol):
    """One format of stored rows."""

    @property
    def width(self) -> int:
        """`W'`."""
        ...

    @property
    def element(self) -> torch.dtype:
        """Type of the tensors that hold stored rows."""
        ...

    @property
    def row_format(self) -> RowFormat | None:
        """How bytes and scales lie; None: rows are plain elements."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., W]` -> `[..., W']`; each row by itself, so alike on every layout."""
        ...

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[..., W']` -> `[..., W]` in a compute type."""
        ...


class PlainRows:
    """Elements as they are, rounded to the type of the cache."""

    row_format = None

    def __init__(self, width: int, element: torch.dtype) -> None:
        self.width = width
        self.element = element

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rounded; the rows themselves where the types agree."""
        return rows.to(self.element)

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Converted; the stored rows themselves where the types agree."""
        return stored.to(dtype)


def create_row_codec(rows: RowFormat, kernels: Kernels | None = None) -> RowCodec:
    """The codec of a format.

    Args:
        rows: the format.
        kernels: who encodes bytes; None: torch.
    """
    if rows.is_quantized:
        return QuantizedRows(rows, kernels)
    return PlainRows(rows.width, getattr(torch, rows.dtype))
