"""A pass as graphs of a device, and what the host does between them.

A graph holds what was launched between two calls of its api. Where a collective cannot be captured,
the graph ends, the host makes the call, and the next graph begins:

    layers ... | all_reduce | ... | all_gather | ...        | the host, with the schedule guard
    graph 0                  graph 1            graph 2

A communicator whose calls may be captured leaves the graph whole; then only the guard's checks run
on the host, before the graph that holds the calls is launched.

Results of calls on the host move to memory that the next graph reads in every replay. Tensors that
a graph makes lie in the pool of all graphs, which no other allocation may use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from heddle.kernels.recording.inputs import Input, take_over
from heddle.kernels.recording.noting import noted_by


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> object:
        """Do it again, on the same memory."""
        ...


class GraphApi(Protocol):
    """Captures what a thread launches on a device; one capture at a time."""

    @property
    def num_bytes(self) -> int:
        """Of memory that graphs compute in, shared by all of them."""
        ...

    def begin(self) -> None:
        """Capture from here on."""
        ...

    def end(self) -> Graph:
        """What was launched since; it has been done once."""
        ...

    def abandon(self) -> None:
        """Drop what was begun, if something was; an error is on its way."""
        ...


class GraphPieces:
    """A captured pass.

    Args:
        inputs: of the pass that is captured; from then on they are the memory that replays read.
        api: of the device.
    """

    def __init__(self, inputs: Sequence[Input], api: GraphApi) -> None:
        self.inputs = tuple(inputs)
        self.num_graphs = 0
        self._api = api
        self._steps: list[Callable[[], object]] = []
        self._output: torch.Tensor | None = None

    def capture(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute, and keep how."""
        try:
            with noted_by(self):
                self._api.begin()
                self._output = compute()
                self._close()
        except BaseException:
            self._api.abandon()
            raise
        return self._output

    def repeat(self, inputs: Sequence[Input]) -> torch.Tensor:
        """The result for other inputs, good until the next repetition.

        Args:
            inputs: as many as were captured, of the same shapes and types.
        """
        assert self._output is not None, "captured before"
        take_over(self.inputs, inputs)
        for step in self._steps:
            step()
        return self._output

    def refuse(self, reason: str) -> None:
        """See `Notes.refuse`; passes that were watched before did no such thing."""
        raise AssertionError(f"a pass is captured that its watch has let through: {reason}")

    def note_call(self, function: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """See `Notes.note_call`."""
        if getattr(next(iter(given), None), "is_capturable", False):
            return function(*given)
        self._close()
        with noted_by(None):
            kept = function(*given)
        self._steps.append(lambda: kept.copy_(function(*given)))
        self._api.begin()
        return kept

    def note_host_call(self, call: Callable[[], object]) -> None:
        """See `Notes.note_host_call`; made before the graph around it is launched."""
        self._steps.append(call)

    def _close(self) -> None:
        self._steps.append(self._api.end().replay)
        self.num_graphs += 1
