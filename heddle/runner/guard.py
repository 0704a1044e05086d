"""Holds every collective of a step against the plan's schedule, before the call is made.

Collective libraries do not notice when ranks disagree: equal sizes with swapped order or other
dtypes give garbage without an error. Here a call that is not the next entry of the schedule stops
on the rank that strays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from heddle.comm.base import Communicator, RankGroups
from heddle.errors import PlanMismatch
from heddle.layout.mesh import GroupKind
from heddle.step.schedule import Collective


class ScheduleGuard:
    """Walks the schedule of one step after another."""

    def __init__(self) -> None:
        self._expected: Iterator[Collective] | None = None
        self._count = 0

    def begin(self, schedule: Iterable[Collective]) -> None:
        """Start a step."""
        self._expected = iter(schedule)
        self._count = 0

    def check(self, op: str, group: GroupKind, tensor: torch.Tensor) -> None:
        """Compare a call with the next entry.

        Raises:
            PlanMismatch: another call was due, or none.
        """
        if self._expected is None:
            return
        found = Collective(op, group, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        due = next(self._expected, None)
        if found != due:
            raise PlanMismatch(
                f"collective {self._count} of the step is {found}, the plan's schedule says {due}"
            )
        self._count += 1

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
                f"the plan's schedule still has {missing}"
            )


class GuardedCommunicator:
    """A communicator whose calls are held against the schedule."""

    def __init__(self, inner: Communicator, kind: GroupKind, guard: ScheduleGuard) -> None:
        self._inner = inner
        self._kind = kind
        self._guard = guard

    @property
    def rank(self) -> int:
        """Place in this group's ordered list."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Members of this group."""
        return self._inner.world_size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        self._guard.check("all_gather", self._kind, tensor)
        return self._inner.all_gather(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.reduce_scatter`."""
        self._guard.check("reduce_scatter", self._kind, tensor)
        return self._inner.reduce_scatter(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        self._guard.check("all_reduce", self._kind, tensor)
        return self._inner.all_reduce(tensor)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_to_all`."""
        self._guard.check("all_to_all", self._kind, tensor)
        return self._inner.all_to_all(tensor)

    def set_deadline(self, deadline: float | None) -> None:
        """See `Communicator.set_deadline`."""
        self._inner.set_deadline(deadline)


def guard_groups(groups: RankGroups, guard: ScheduleGuard) -> RankGroups:
    """Guard every group that has more than one member; a group of one issues nothing."""

    def guarded(kind: GroupKind) -> Communicator:
        inner = groups.of(kind)
        return inner if inner.world_size == 1 else GuardedCommunicator(inner, kind, guard)

    return RankGroups(
        tp=guarded("tp"), pcp=guarded("pcp"), dcp=guarded("dcp"), slice=guarded("slice")
    )
