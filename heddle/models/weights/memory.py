"""Weights that lie in memory, and the headers of weights that lie anywhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch

from heddle.models.weights.source import BlockSource, Span, WeightSource

META = torch.device("meta")


def sliced(tensor: torch.Tensor, *spans: Span | None) -> torch.Tensor:
    """A view of the spans of a tensor's first dimensions; None: all of one."""
    for dim, span in enumerate(spans):
        if span is not None:
            tensor = tensor.narrow(dim, span[0], span[1] - span[0])
    return tensor


class MemorySource:
    """A `WeightSource` over tensors in memory.

    Args:
        tensors: by name.
        place: of them, for messages.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], place: str = "memory") -> None:
        self._tensors = tensors
        self._place = place

    def names(self) -> Collection[str]:
        """All tensor names."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def location(self, _name: str, /) -> str:
        """The place."""
        return self._place

    def read(
        self,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        depth: Span | None = None,
    ) -> torch.Tensor:
        """A view of a tensor; see `WeightSource.read`."""
        return sliced(self._tensors[name], rows, cols, depth)


class HeaderSource:
    """A `WeightSource` that reads shapes and no bytes."""

    def __init__(self, inner: WeightSource) -> None:
        self._inner = inner

    def names(self) -> Collection[str]:
        """All tensor names."""
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return self._inner.shape(name)

    def location(self, name: str) -> str:
        """The file that holds a tensor."""
        return self._inner.location(name)

    def read(
        self,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        depth: Span | None = None,
    ) -> torch.Tensor:
        """A slice without content, on the meta device."""
        whole = torch.empty(self.shape(name), device=META)
        # Of its own size: a view would be weighed as the whole tensor.
        return torch.empty_like(sliced(whole, rows, cols, depth))

    def stored_kind(self, name: str) -> str:
        """What GGML calls the form of a tensor; empty where it has none."""
        return self._inner.stored_kind(name) if isinstance(self._inner, BlockSource) else ""

    def read_blocks(
        self,
        name: str,
        rows: Span | None = None,  # noqa: ARG002
        cols: Span | None = None,  # noqa: ARG002
    ) -> npt.NDArray[np.uint8]:
        """Nobody fills a weight that is only weighed."""
        raise AssertionError(f"{name}: headers hold no blocks")
