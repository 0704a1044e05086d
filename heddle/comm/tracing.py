"""A communicator that writes down what passes through it: calls, shapes and bytes.

Bytes are those a rank receives (`heddle.step.traffic.received_bytes`), from the real sizes of the
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from heddle.comm.base import Communicator, Pending, World
from heddle.layout.mesh import GroupKind
from heddle.step.traffic import CollectiveOp, received_bytes


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One call, as one rank saw it."""

    sequence: int
    """Number of the call on this rank, over all its groups, from 0."""
    op: CollectiveOp
    kind: GroupKind
    label: str
    """Where in the model the call was made; set by the caller."""
    shape: tuple[int, ...]
    """Of the input; of a receive, as announced."""
    dtype: torch.dtype
    world_size: int
    bytes_received: int


@dataclass(slots=True)
class Trace:
    """The calls of one rank, in order."""

    records: list[TraceRecord] = field(default_factory=list)
    label: str = ""
    """Copied into every later record, for example `layer 3`."""

    def bytes_received(self) -> int:
        """Sum over all records."""
        return sum(record.bytes_received for record in self.records)

    def clear(self) -> None:
        """Forget the records; numbering starts again at 0."""
        self.records.clear()

    def add(
        self,
        op: CollectiveOp,
        kind: GroupKind,
        shape: Sequence[int],
        dtype: torch.dtype,
        world_size: int,
    ) -> None:
        """Append a record."""
        own = math.prod(shape) * dtype.itemsize
        self.records.append(
            TraceRecord(
                sequence=len(self.records),
                op=op,
                kind=kind,
                label=self.label,
                shape=tuple(shape),
                dtype=dtype,
                world_size=world_size,
                bytes_received=received_bytes(op, own, world_size),
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
        """Traced `all_gather`."""
        self._add("all_gather", tensor.shape, tensor.dtype)
        return self._inner.all_gather(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Traced `reduce_scatter`."""
        self._add("reduce_scatter", tensor.shape, tensor.dtype)
        return self._inner.reduce_scatter(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Traced `all_reduce`."""
        self._add("all_reduce", tensor.shape, tensor.dtype)
        return self._inner.all_reduce(tensor)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Traced `all_to_all`."""
        self._add("all_to_all", tensor.shape, tensor.dtype)
        return self._inner.all_to_all(tensor)

    def shift(self, tensor: torch.Tensor) -> Pending:
        """Traced `shift`, recorded when it begins."""
        self._add("shift", tensor.shape, tensor.dtype)
        return self._inner.shift(tensor)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Traced `send`."""
        self._add("send", tensor.shape, tensor.dtype)
        self._inner.send(tensor, target)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Traced `receive`, as announced."""
        self._add("receive", shape, dtype)
        return self._inner.receive(shape, dtype, source)

    def set_deadline(self, deadline: float | None) -> None:
        """Passed on."""
        self._inner.set_deadline(deadline)

    def _add(self, op: CollectiveOp, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._trace.add(op, self._kind, shape, dtype, self.world_size)


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
