"""What a rank says to the others, as totals per kind of call: how often, how much, how long.

Cheaper than a trace (`heddle.comm.tracing`): nothing is kept of a single call, so that a server
counts all the time. Bytes are those a rank receives (`heddle.step.traffic.received_bytes`). Seconds
are those that it spends in a call, waits for its peers included; of a shift, those of its beginning
and of `wait`, not the computing that hides it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from time import monotonic

import torch

from heddle.comm.base import Communicator, Pending, RankGroups
from heddle.comm.rank_clock import RankClock
from heddle.layout.mesh import GROUP_KINDS, GroupKind
from heddle.step.batch import CollectiveTotal
from heddle.step.traffic import CollectiveOp, received_bytes


class CollectiveCounts:
    """The calls of one rank since they were last taken."""

    def __init__(self, clock: RankClock | None = None) -> None:
        """Count nothing yet.

        Args:
            clock: told of each single call; None: nobody is.
        """
        self._tallies: list[_Tally] = []
        self._clock = clock

    def tally(self, op: CollectiveOp, group: GroupKind, world_size: int) -> _Tally:
        """What counts the calls of one kind from now on."""
        made = _Tally(op, group, world_size, self._clock)
        self._tallies.append(made)
        return made

    def take(self) -> tuple[CollectiveTotal, ...]:
        """The kinds that were called, by group; everything begins at 0 again."""
        return tuple(tally.take() for tally in self._tallies if tally.num_calls_of_size)


class _Tally:
    """Calls of one kind. A step has a hundred of them, so what can wait until its end does."""

    __slots__ = ("_clock", "_group", "_op", "_world_size", "num_calls_of_size", "seconds")

    def __init__(
        self, op: CollectiveOp, group: GroupKind, world_size: int, clock: RankClock | None
    ) -> None:
        self._op, self._group, self._world_size = op, group, world_size
        self._clock = clock
        self.num_calls_of_size: defaultdict[int, int] = defaultdict(int)
        """By bytes that were handed in."""
        self.seconds = 0.0

    def add(self, own_bytes: int, began: float) -> None:
        """A call has returned that began at a time of `monotonic`."""
        self.seconds += monotonic() - began
        self.num_calls_of_size[own_bytes] += 1
        if self._clock is not None:
            self._clock.note_call(self._op, self._group, self._world_size, own_bytes, began)

    def add_wait(self, began: float) -> None:
        """What a call had begun is there; it is part of that call."""
        self.seconds += monotonic() - began
        if self._clock is not None:
            self._clock.note_wait(self._group, began)

    def take(self) -> CollectiveTotal:
        """All of it; begins at 0 again."""
        sizes, seconds = self.num_calls_of_size, self.seconds
        self.num_calls_of_size, self.seconds = defaultdict(int), 0.0
        num_bytes = sum(
            count * received_bytes(self._op, own, self._world_size) for own, count in sizes.items()
        )
        return CollectiveTotal(self._op, self._group, sum(sizes.values()), num_bytes, seconds)


class CountingCommunicator:
    """Lets another communicator do each call, and counts it."""

    def __init__(self, inner: Communicator, kind: GroupKind, counts: CollectiveCounts) -> None:
        self._inner = inner

        def tally(op: CollectiveOp) -> _Tally:
            return counts.tally(op, kind, inner.world_size)

        self._all_gather = tally("all_gather")
        self._reduce_scatter = tally("reduce_scatter")
        self._all_reduce = tally("all_reduce")
        self._all_to_all = tally("all_to_all")
        self._shift = tally("shift")
        self._send = tally("send")
        self._receive = tally("receive")

    @property
    def rank(self) -> int:
        """Place in the group."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Members of the group."""
        return self._inner.world_size

    @property
    def is_capturable(self) -> bool:
        """As the inner communicator says; calls that a graph holds are made uncounted."""
        return getattr(self._inner, "is_capturable", False)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counted `all_gather`."""
        began = monotonic()
        result = self._inner.all_gather(tensor)
        self._all_gather.add(tensor.nbytes, began)
        return result

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counted `reduce_scatter`."""
        began = monotonic()
        result = self._inner.reduce_scatter(tensor)
        self._reduce_scatter.add(tensor.nbytes, began)
        return result

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counted `all_reduce`."""
        began = monotonic()
        result = self._inner.all_reduce(tensor)
        self._all_reduce.add(tensor.nbytes, began)
        return result

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counted `all_to_all`."""
        began = monotonic()
        result = self._inner.all_to_all(tensor)
        self._all_to_all.add(tensor.nbytes, began)
        return result

    def shift(self, tensor: torch.Tensor) -> Pending:
        """Counted `shift`, when it begins; what `wait` takes is added then."""
        began = monotonic()
        pending = self._inner.shift(tensor)
        self._shift.add(tensor.nbytes, began)
        return _CountedPending(pending, self._shift)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Counted `send`."""
        began = monotonic()
        self._inner.send(tensor, target)
        self._send.add(tensor.nbytes, began)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Counted `receive`."""
        began = monotonic()
        result = self._inner.receive(shape, dtype, source)
        self._receive.add(math.prod(shape) * dtype.itemsize, began)
        return result

    def set_deadline(self, deadline: float | None) -> None:
        """Passed on."""
        self._inner.set_deadline(deadline)


class _CountedPending:
    """A shift whose wait is timed."""

    def __init__(self, inner: Pending, tally: _Tally) -> None:
        self._inner, self._tally = inner, tally

    def wait(self) -> torch.Tensor:
        """See `Pending.wait`."""
        began = monotonic()
        result = self._inner.wait()
        self._tally.add_wait(began)
        return result


def count_groups(groups: RankGroups, counts: CollectiveCounts) -> RankGroups:
    """Count the calls of every group that has more than one member; others move nothing."""

    def counted(kind: GroupKind) -> Communicator:
        inner = groups.of(kind)
        return inner if inner.world_size == 1 else CountingCommunicator(inner, kind, counts)

    return RankGroups(**{kind: counted(kind) for kind in GROUP_KINDS})
