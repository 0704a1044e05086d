"""Graphs without a device: what was launched is noted, and done again on the same memory.

As on a device, a replay reads the addresses that were read before, computes in memory that the
graph owns, and knows nothing of the Python around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager

import torch

from heddle.kernels.recording.graphs import Graphs
from heddle.kernels.recording.inputs import Input
from heddle.kernels.recording.recording import Recording


class NotedGraphs:
    """A `GraphApi` of the CPU, for operations of torch and kernels of numba."""

    def __init__(self, num_threads: int = 1) -> None:
        self.graphs: list[Recording] = []
        self._num_threads = num_threads
        self._open: tuple[Recording, AbstractContextManager[None]] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(graph.num_bytes for graph in self.graphs)

    @property
    def memory(self) -> list[torch.Tensor]:
        """What replays compute in."""
        return [tensor for graph in self.graphs for tensor in graph.memory]

    def begin(self) -> None:
        assert self._open is None, "one capture at a time"
        graph = Recording([], self._num_threads)
        noting = graph.noting()
        noting.__enter__()
        self._open = (graph, noting)

    def end(self) -> Recording:
        assert self._open is not None, "begun before"
        graph, noting = self._open
        self._open = None
        noting.__exit__(None, None, None)
        assert graph.refusal is None, graph.refusal
        self.graphs.append(graph)
        return graph

    def abandon(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None


def spoil(tensors: Sequence[torch.Tensor]) -> None:
    """Numbers that no result survives; indices stay such that a kernel may follow them."""
    for tensor in tensors:
        tensor.fill_(math.nan if tensor.is_floating_point() else 0)


class SpoiledGraphs(Graphs):
    """Before each pass spoils everything that an earlier one has left: memory of graphs, inputs
    that were copied, and the caller's own tensors.
    """

    def __init__(
        self, api: NotedGraphs | None = None, row_counts: Sequence[int] = (1, 2, 4)
    ) -> None:
        self.noted = api or NotedGraphs()
        super().__init__(self.noted, row_counts)
        self._given: list[torch.Tensor] = []

    @property
    def addresses(self) -> list[tuple[int, int]]:
        """Where memory of graphs and inputs lies, and its size."""
        memory = [*self.noted.memory, *self._buffers()]
        return sorted((each.data_ptr(), each.untyped_storage().nbytes()) for each in memory)

    def run(
        self, key: Hashable, inputs: Sequence[Input], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        spoil([*self.noted.memory, *self._buffers(), *self._given])
        self._given = [given for given in inputs if isinstance(given, torch.Tensor)]
        before, known = self.addresses, self.num_captured
        found = super().run(key, inputs, compute)
        assert self.num_captured > known or self.addresses == before, "memory of graphs has moved"
        return found

    def _buffers(self) -> list[torch.Tensor]:
        return [
            given
            for pieces in self.captured
            for given in pieces.inputs
            if isinstance(given, torch.Tensor)
        ]
