"""Where thread ranks meet: each call deposits a payload and leaves with everybody's.

A meeting proceeds in rounds. A member enters its next round and may go on working before it
collects what the others brought, so several rounds can be open at once: rounds are separate
objects, each is forgotten when its last member has come, and no second barrier is needed. Two ranks
that hand something over have a meeting of their own.
Whatever goes wrong first (a rank raised, the calls differ, a deadline passed, a rank left) ends the
whole world at once: a bug is a traceback, not a hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from heddle.comm.members import Members
from heddle.errors import CollectiveTimeout, HeddleError, PlanMismatch, RankFailed

T = TypeVar("T")


class Call(NamedTuple):
    """What one rank believes it is doing; equal for all members of a round."""

    op: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def words(self) -> str:
        """As errors spell it."""
        return f"{self.op} of {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong in a world."""

    rank: int | None
    cause: BaseException

    def error(self) -> HeddleError:
        """What the other ranks raise: a disagreement as itself, all else as a failed rank."""
        if isinstance(self.cause, PlanMismatch):
            return PlanMismatch(str(self.cause))
        who = "the world was ended" if self.rank is None else f"rank {self.rank} failed first"
        return RankFailed(f"{who}: {type(self.cause).__name__}: {self.cause}")


@dataclass(slots=True)
class _Round(Generic[T]):
    """One collective in the making, keyed by place in the group."""

    number: int
    calls: dict[int, Call] = field(default_factory=dict)
    payloads: dict[int, T] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ticket(Generic[T]):
    """One member's claim to what a round brings."""

    round: _Round[T]
    place: int
    deadline: float
    limit: str


class Hall(Generic[T]):
    """All meetings of one world, under one lock, with one failure."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failure: Failure | None = None
        self.departed: set[int] = set()
        self._lists: dict[str, Members] = {}
        self._meetings: dict[tuple[str, tuple[int, ...]], Meeting[T]] = {}

    def open(self, kind: str, members: Members, own: tuple[int, ...]) -> Meeting[T]:
        """The meeting of one group, made by whichever member asks first.

        Raises:
            PlanMismatch: another rank formed this kind from other lists.
        """
        with self.lock:
            known = self._lists.setdefault(kind, members)
            if known != members:
                raise PlanMismatch(f"{kind} groups {members} differ from another rank's {known}")
            return self._meetings.setdefault((kind, own), Meeting(self, kind, own))

    def pair(self, kind: str, source: int, target: int) -> Meeting[T]:
        """The meeting in which one global rank hands things to another, in order."""
        with self.lock:
            name, own = f"{kind} from {source} to {target}", (source, target)
            return self._meetings.setdefault((name, own), Meeting(self, name, own))

    def fail(self, rank: int | None, cause: BaseException) -> None:
        """Record the first failure and wake everybody; later ones change nothing."""
        with self.lock:
            self.fail_locked(rank, cause)

    def fail_locked(self, rank: int | None, cause: BaseException) -> None:
        """As `fail`, for a caller that holds the lock."""
        if self.failure is None:
            self.failure = Failure(rank, cause)
        self._wake()

    def leave(self, rank: int) -> None:
        """`rank` will make no more calls; who waits for it is told."""
        with self.lock:
            self.departed.add(rank)
            self._wake()

    def _wake(self) -> None:
        for meeting in self._meetings.values():
            meeting.changed.notify_all()


class Meeting(Generic[T]):
    """The rounds of one group."""

    def __init__(self, hall: Hall[T], kind: str, ranks: Sequence[int]) -> None:
        self.changed = threading.Condition(hall.lock)
        self._hall = hall
        self._kind = kind
        self._ranks = tuple(ranks)
        self._num_entered = [0] * len(self._ranks)
        self._rounds: dict[int, _Round[T]] = {}

    @property
    def size(self) -> int:
        """Members of the group."""
        return len(self._ranks)

    def pair(self, source: int, target: int) -> Meeting[T]:
        """The meeting of two places of this group; the giver has place 0 in it, the taker 1."""
        return self._hall.pair(self._kind, self._ranks[source], self._ranks[target])

    def meet(self, place: int, call: Call, payload: T, deadline: float, limit: str) -> list[T]:
        """Enter and collect at once."""
        return self.collect(self.enter(place, call, payload, deadline, limit))

    def enter(self, place: int, call: Call, payload: T, deadline: float, limit: str) -> Ticket[T]:
        """Deposit a payload in the caller's next round; waits for nobody.

        Args:
            place: the caller's place in the group.
            call: compared with the other members'.
            payload: handed to all members; nobody may change it afterwards.
            deadline: monotonic time by which all must have come.
            limit: names the deadline in the error.

        Raises:
            PlanMismatch: another member makes a different call.
            RankFailed: the world has failed elsewhere.
        """
        with self._hall.lock:
            self._raise_failure()
            number = self._num_entered[place]
            current = self._rounds.setdefault(number, _Round(number))
            self._agree(current, place, call)
            self._num_entered[place] += 1
            current.calls[place] = call
            current.payloads[place] = payload
            if len(current.payloads) == self.size:
                del self._rounds[number]
                self.changed.notify_all()
        return Ticket(current, place, deadline, limit)

    def collect(self, ticket: Ticket[T]) -> list[T]:
        """The payloads of all members of a round, in group order, once all have come.

        Raises:
            PlanMismatch: a member makes another call, or will make none.
            CollectiveTimeout: the deadline passed here.
            RankFailed: the world has failed elsewhere.
        """
        current = ticket.round
        with self._hall.lock:
            while len(current.payloads) < self.size:
                self._raise_failure()
                self._wait(ticket)
        return [current.payloads[index] for index in range(self.size)]

    def _raise_failure(self) -> None:
        failure = self._hall.failure
        if failure is not None:
            raise failure.error() from failure.cause

    def _agree(self, current: _Round[T], place: int, call: Call) -> None:
        for other, theirs in current.calls.items():
            if theirs != call:
                self._fail(
                    place,
                    PlanMismatch(
                        f"{self._kind} call {current.number}: rank {self._ranks[place]} makes "
                        f"{call.words}, rank {self._ranks[other]} makes {theirs.words}"
                    ),
                )

    def _wait(self, ticket: Ticket[T]) -> None:
        current, place = ticket.round, ticket.place
        missing = [rank for i, rank in enumerate(self._ranks) if i not in current.payloads]
        what = f"{self._kind} call {current.number}, {current.calls[place].words}"
        gone = [rank for rank in missing if rank in self._hall.departed]
        if gone:
            self._fail(place, PlanMismatch(f"{what}: ranks {gone} returned without making it"))
        remaining = ticket.deadline - time.monotonic()
        if remaining <= 0:
            error = CollectiveTimeout(
                f"{what}: rank {self._ranks[place]} waited until {ticket.limit}; "
                f"missing ranks: {missing}"
            )
            self._fail(place, error)
        self.changed.wait(remaining)

    def _fail(self, place: int, error: HeddleError) -> None:
        self._hall.fail_locked(self._ranks[place], error)
        raise error
