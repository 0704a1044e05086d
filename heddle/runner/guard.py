"""Holds every collective of a step against the plan's schedule, before the call is made.

Collective libraries do not notice when ranks disagree: equal sizes with swapped order or other
dtypes give garbage without an error. Here a call that is not the next entry of the schedule stops
on the rank that strays. A size that no plan can know is None in the schedule and fits any: ranks
agree on it by an exchange of counts just before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from heddle.comm.base import Communicator, Pending, RankGroups
from heddle.errors import PlanMismatch
from heddle.faults.page import call_words
from heddle.faults.watch import RankWatch
from heddle.kernels.recording.noting import always_on_host, as_one_call, never_repeated
from heddle.layout.mesh import GROUP_KINDS, GroupKind
from heddle.step.traffic import Collective

_PRIME, _MASK = 0x100000001B3, (1 << 64) - 1
"""A hash of 64 bits grows by multiplying and adding, so it depends on the order of calls."""
_MAX_KNOWN = 4096
"""Calls of which it is kept what is said of them; a step has a few that differ."""


class _Known(NamedTuple):
    """What is said of a call, made once for all that are alike."""

    word: int
    """64 bits, the same in every process."""
    page_words: bytes


class ScheduleGuard:
    """Walks the schedule of one step after another."""

    def __init__(self, watch: RankWatch | None = None) -> None:
        """Guard nothing yet.

        Args:
            watch: told of every call, and when it has come back; None: nobody is.
        """
        self._watch = watch or RankWatch()
        self._expected: Iterator[Collective] | None = None
        self._count = 0
        self._hashes: dict[GroupKind, int] = {}
        self._known: dict[Collective, _Known] = {}
        self.note_return = self._watch.end_call
        """To be called when the call that was checked last has come back."""

    @property
    def call_hashes(self) -> dict[GroupKind, int]:
        """Of the calls of the last step, in their order, by kind of group."""
        return dict(self._hashes)

    def begin(self, schedule: Iterable[Collective]) -> None:
        """Start a step."""
        self._expected = iter(schedule)
        self._count = 0
        self._hashes.clear()

    @always_on_host
    def check(self, op: str, group: GroupKind, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Compare a call with the next entry.

        Raises:
            PlanMismatch: another call was due, or none.
        """
        if self._expected is None:
            return
        call = due = next(self._expected, None)
        # A step makes hundreds of calls: the usual case is one comparison, without new values.
        is_due = call == (op, group, shape, _name_of(dtype))
        if call is None or not is_due:
            call = Collective(op, group, tuple(shape), _name_of(dtype))
            self._check_unequal(call, due)
        known = self._known.get(call) or self._learn(call)
        hashes = self._hashes
        hashes[group] = (hashes.get(group, 0) * _PRIME + known.word) & _MASK
        self._count += 1
        self._watch.begin_call(known.page_words)

    def _learn(self, call: Collective) -> _Known:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        op, group, shape, dtype = call
        sizes = [size or 0 for size in shape]  # a call that was made leaves none open
        known = self._known[call] = _Known(_word(call), call_words(op, group, dtype, sizes))
        return known

    def _check_unequal(self, found: Collective, due: Collective | None) -> None:
        """Of two calls that differ: raise, unless it is by a size that the plan leaves open."""
        if due is None or not _fits(found, due):
            raise PlanMismatch(
                f"collective {self._count} of the step is {found}, the plan's schedule says {due}",
                "collective",
            )

    def finish(self) -> None:
        """End a step.

        Raises:
            PlanMismatch: a scheduled call was not made.
        """
        expected, self._expected = self._expected, None
        missing = next(expected, None) if expected is not None else None
        if missing is not None:
            raise PlanMismatch(
                f"the step ended after {self._count} collectives, "
                f"the plan's schedule still has {missing}",
                "collective",
            )


def _word(call: Collective) -> int:
    """64 bits of a call, the same in every process."""
    body = f"{call.op} {call.shape} {call.dtype}".encode()
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little")


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fits(found: Collective, due: Collective) -> bool:
    """True when a call is the one that is due; None in its shape fits any size."""
    if len(found.shape) != len(due.shape):
        return False
    pairs = zip(found.shape, due.shape, strict=True)
    shape = tuple(size if wanted is None else wanted for size, wanted in pairs)
    return found == due._replace(shape=shape)


class GuardedCommunicator:
    """A communicator whose calls are held against the schedule."""

    def __init__(self, inner: Communicator, kind: GroupKind, guard: ScheduleGuard) -> None:
        self._inner = inner
        self._kind = kind
        self._check = guard.check
        self._note_return = guard.note_return

    @property
    def rank(self) -> int:
        """Place in this group's ordered list."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Members of this group."""
        return self._inner.world_size

    @property
    def is_capturable(self) -> bool:
        """A graph may hold the calls of this group, as its communicator says."""
        return getattr(self._inner, "is_capturable", False)

    @as_one_call
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        self._check("all_gather", self._kind, tensor.shape, tensor.dtype)
        result = self._inner.all_gather(tensor)
        self._note_return()
        return result

    @as_one_call
    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.reduce_scatter`."""
        self._check("reduce_scatter", self._kind, tensor.shape, tensor.dtype)
        result = self._inner.reduce_scatter(tensor)
        self._note_return()
        return result

    @as_one_call
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        self._check("all_reduce", self._kind, tensor.shape, tensor.dtype)
        result = self._inner.all_reduce(tensor)
        self._note_return()
        return result

    @as_one_call
    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_to_all`."""
        self._check("all_to_all", self._kind, tensor.shape, tensor.dtype)
        result = self._inner.all_to_all(tensor)
        self._note_return()
        return result

    @never_repeated
    def shift(self, tensor: torch.Tensor) -> Pending:
        """See `Communicator.shift`; held against the schedule when it begins."""
        self._check("shift", self._kind, tensor.shape, tensor.dtype)
        result = self._inner.shift(tensor)
        self._note_return()
        return result

    @never_repeated
    def send(self, tensor: torch.Tensor, target: int) -> None:
        """See `Communicator.send`."""
        self._check("send", self._kind, tensor.shape, tensor.dtype)
        self._inner.send(tensor, target)
        self._note_return()

    @never_repeated
    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """See `Communicator.receive`; held against the schedule as announced."""
        self._check("receive", self._kind, shape, dtype)
        received = self._inner.receive(shape, dtype, source)
        self._note_return()
        return received

    def set_deadline(self, deadline: float | None) -> None:
        """See `Communicator.set_deadline`."""
        self._inner.set_deadline(deadline)


def guard_groups(groups: RankGroups, guard: ScheduleGuard) -> RankGroups:
    """Guard every group that has more than one member; a group of one issues nothing."""

    def guarded(kind: GroupKind) -> Communicator:
        inner = groups.of(kind)
        return inner if inner.world_size == 1 else GuardedCommunicator(inner, kind, guard)

    return RankGroups(**{kind: guarded(kind) for kind in GROUP_KINDS})
