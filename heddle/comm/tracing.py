"""A communicator that writes down what passes through it: calls, shapes and bytes.

Bytes are those a rank receives under the textbook algorithms, from the real sizes of the tensors:
all-gather (N-1) x own, reduce-scatter and all-to-all (N-1)/N x input, all-reduce twice that; a
shift its own size, a receive what is announced, a send nothing.

Legend: `N` ranks in the group in hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from heddle.comm.base import Communicator, Pending, World
from heddle.layout.mesh import GroupKind


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One call, as one rank saw it."""

    sequence: int
    """Number of the call on this rank, over all its groups, from 0."""
    op: str
    kind: GroupKind
    label: str
    """Where in the model the call was made; set by the caller."""
    shape: tuple[int, ...]
    """Of the input; of a receive, as announced."""
    dtype: torch.dtype
    world_size: int
    bytes_received: float
    """A fraction only where an all-reduce does not divide by N."""


@dataclass(slots=True)
class Trace:
    """The calls of one rank, in order."""

    records: list[TraceRecord] = field(default_factory=list)
    label: str = ""
    """Copied into every later record, for example `layer 3`."""

    def bytes_received(self) -> float:
        """Sum over all records."""
        return sum(record.bytes_received for record in self.records)

    def clear(self) -> None:
        """Forget the records; numbering starts again at 0."""
        self.records.clear()

    def add(
        self, op: str, kind: GroupKind, tensor: torch.Tensor, world_size: int, factor: float
    ) -> None:
        """Append a record whose bytes are `factor` (N-1)/N of the input."""
        size = tensor.numel() * tensor.element_size()
        received = factor * (world_size - 1) * size / world_size
        self.append(op, kind, tensor.shape, tensor.dtype, world_size, received)

    def append(
        self,
        op: str,
        kind: GroupKind,
        shape: Sequence[int],
        dtype: torch.dtype,
        world_size: int,
        bytes_received: float,
    ) -> None:
        """Append a record of known bytes."""
        self.records.append(
            TraceRecord(
                sequence=len(self.records),
                op=op,
                kind=kind,
                label=self.label,
                shape=tuple(shape),
                dtype=dtype,
                world_size=world_size,
                bytes_received=bytes_received,
            )
        )


class TracingCommunicator:
    """Records each call, then lets another communicator do it."""

    def __init__(self, inner: Communicator, kind: GroupKind, trace: Trace) -> None:
        self._inner = inner
        self._kind = kind
        self._trace = trace

    @property
    def rank(self) -> int:
        """Place in the group."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Members of the group."""
        return self._inner.world_size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Traced `all_gather`: (N-1) x own."""
        self._add("all_gather", tensor, factor=self.world_size)
        return self._inner.all_gather(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Traced `reduce_scatter`: (N-1)/N x input."""
        self._add("reduce_scatter", tensor, factor=1)
        return self._inner.reduce_scatter(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Traced `all_reduce`: 2(N-1)/N x input."""
        self._add("all_reduce", tensor, factor=2)
        return self._inner.all_reduce(tensor)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Traced `all_to_all`: (N-1)/N x input."""
        self._add("all_to_all", tensor, factor=1)
        return self._inner.all_to_all(tensor)

    def shift(self, tensor: torch.Tensor) -> Pending:
        """Traced `shift`: own, recorded when it begins."""
        self._append("shift", tensor.shape, tensor.dtype, is_received=True)
        return self._inner.shift(tensor)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Traced `send`: nothing comes here."""
        self._append("send", tensor.shape, tensor.dtype, is_received=False)
        self._inner.send(tensor, target)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Traced `receive`: what is announced."""
        self._append("receive", shape, dtype, is_received=True)
        return self._inner.receive(shape, dtype, source)

    def set_deadline(self, deadline: float | None) -> None:
        """Passed on."""
        self._inner.set_deadline(deadline)

    def _add(self, op: str, tensor: torch.Tensor, factor: float) -> None:
        self._trace.add(op, self._kind, tensor, self.world_size, factor)

    def _append(
        self, op: str, shape: Sequence[int], dtype: torch.dtype, *, is_received: bool
    ) -> None:
        received = math.prod(shape) * dtype.itemsize if is_received else 0
        self._trace.append(op, self._kind, shape, dtype, self.world_size, received)


class TracingWorld:
    """A world whose groups write into one trace. Groups of one move nothing and are not traced."""

    def __init__(self, inner: World) -> None:
        self._inner = inner
        self.trace = Trace()

    @property
    def global_rank(self) -> int:
        """Rank in the whole world."""
        return self._inner.global_rank

    def group(self, kind: GroupKind, members: Sequence[Sequence[int]]) -> Communicator:
        """The inner world's group, traced when it has more than one member."""
        inner = self._inner.group(kind, members)
        if inner.world_size == 1:
            return inner
        return TracingCommunicator(inner, kind, self.trace)
