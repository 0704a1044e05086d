"""Where weights come from: a seam between file formats and the loader.

Names and orientation are those of the Hugging Face checkpoints (`[out, in]`), whatever the file
calls them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

Span = tuple[int, int]
"""A half-open range."""


class WeightSource(Protocol):
    """Tensors of one checkpoint, read by name and by slice."""

    def names(self) -> Collection[str]:
        """All tensor names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor.

        Raises:
            KeyError: no such tensor.
        """
        ...

    def location(self, name: str) -> str:
        """The file that holds a tensor, or that should; for messages."""
        ...

    def read(
        self,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        depth: Span | None = None,
    ) -> torch.Tensor:
        """A slice of a tensor.

        Args:
            name: one of `names()`.
            rows: range of the first dimension; None: all.
            cols: range of the second dimension, if there is one; None: all.
            depth: range of the third dimension, if there is one; None: all.

        Returns:
            `[rows, cols, depth]`, `[rows, cols]` or `[rows]` on the CPU, in the stored dtype,
            float32 when stored in quantised form. Only the bytes needed are read from disk.

        Raises:
            ModelFileError: the file is damaged.
        """
        ...


class StoredSource(WeightSource, Protocol):
    """A source that also shows what lies in the file, for the readers of quantised forms."""

    def stored_dtype(self, name: str) -> str:
        """The dtype of a tensor, in the spelling of safetensors."""
        ...

    def read_stored(self, name: str, *spans: Span | None) -> torch.Tensor:
        """A slice in the stored dtype.

        Args:
            name: one of `names()`.
            spans: ranges of the first dimensions; None, and further dimensions: all.
        """
        ...


@runtime_checkable
class BlockSource(Protocol):
    """A source whose file packs matrices in blocks of GGML."""

    def stored_kind(self, name: str) -> str:
        """What GGML calls the form of a tensor."""
        ...

    def read_blocks(
        self, name: str, rows: Span | None = None, cols: Span | None = None
    ) -> npt.NDArray[np.uint8]:
        """`[rows, blocks, bytes of a block]` of a matrix, as `read` would order its rows.

        Args:
            name: one of `names()`.
            rows: None: all.
            cols: whole blocks; None: all.
        """
        ...


@runtime_checkable
class PrefetchingSource(Protocol):
    """A source that can be told what is read next."""

    def prefetch(self, name: str, rows: Span | None = None) -> None:
        """Start reading rows of a tensor from disk, in the background."""
        ...
