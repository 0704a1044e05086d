"""N ranks as N threads of one process: the calls of many machines, with no process to start.

It shows that nothing is ambient, it compares what every rank believes at every call, and it is how
anybody can run a layout on a laptop. It says nothing about speed: threads share one interpreter.

Example:
    >>> import torch
    >>> def body(world):
    ...     group = world.group("dcp", [[0, 1]])
    ...     return int(group.all_reduce(torch.tensor(world.global_rank + 1)))
    >>> ThreadGroup(2).run(body)
    [3, 3]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from heddle.comm.base import Communicator, Pending
from heddle.comm.blocks import require_blocks, sum_in_order
from heddle.comm.members import frozen_members, own_members
from heddle.comm.rendezvous import Call, Hall, Meeting
from heddle.comm.solo import SoloCommunicator
from heddle.comm.transfers import Transfer, require_peer, ring_neighbours
from heddle.errors import ConfigError, RankFailed
from heddle.layout.mesh import GroupKind

R = TypeVar("R")


class ThreadGroup:
    """A world of thread ranks.

    Two ways to use it: `run` starts the threads itself; or the caller owns N threads, gives each
    its `world(rank)`, and calls `abort` when one of them raises. A world that has failed stays
    failed; `run` makes a new one at every call.
    """

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        """Make a world.

        Args:
            world_size: number of ranks, at least 1.
            timeout_seconds: the longest a call may wait when no deadline is set.

        Raises:
            ConfigError: `world_size` is below 1.
        """
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} is not legal; a world has at least 1 rank")
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._hall: Hall[torch.Tensor] = Hall()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def world(self, rank: int) -> ThreadWorld:
        """The view of one rank, for use by one thread."""
        return ThreadWorld(self._hall, rank, self._world_size, self._timeout_seconds)

    def abort(self, cause: BaseException | None = None, rank: int | None = None) -> None:
        """End the world: waiting and later calls raise `RankFailed`, naming the first cause."""
        self._hall.fail(rank, cause or RankFailed("aborted by its owner"))

    def run(self, function: Callable[[ThreadWorld], R]) -> list[R]:
        """Call `function(world)` once per rank, each in its own thread.

        Returns:
            The results, in rank order.

        Raises:
            BaseException: the first exception that any rank raised, with its traceback and a note
                that names the rank; the other ranks are stopped at their next collective. So are
                all of them when the caller itself is interrupted.
        """
        self._hall = Hall()
        results: dict[int, R] = {}
        threads = [
            threading.Thread(
                target=self._run_rank,
                args=(rank, function, results),
                name=f"rank{rank}",
                daemon=True,
            )
            for rank in range(self._world_size)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # the caller was interrupted; its ranks must not wait on
            self._hall.fail(None, error)
            raise
        failure = self._hall.failure
        if failure is not None:
            failure.cause.add_note(f"raised on rank {failure.rank} of {self._world_size}")
            raise failure.cause
        return [results[rank] for rank in range(self._world_size)]

    def _run_rank(
        self, rank: int, function: Callable[[ThreadWorld], R], results: dict[int, R]
    ) -> None:
        try:
            results[rank] = function(self.world(rank))
        except BaseException as error:
            self._hall.fail(rank, error)
        else:
            self._hall.leave(rank)


class ThreadWorld:
    """One thread's way to its groups."""

    def __init__(
        self, hall: Hall[torch.Tensor], rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        self._hall = hall
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds

    @property
    def global_rank(self) -> int:
        """Rank in the whole world."""
        return self._rank

    def group(self, kind: GroupKind, members: Sequence[Sequence[int]]) -> Communicator:
        """This rank's group of a kind; see `World.group`.

        Raises:
            TopologyError: the lists do not tile the world.
            PlanMismatch: another rank formed this kind from other lists.
        """
        lists = frozen_members(self._world_size, members)
        own = own_members(self._rank, lists)
        meeting = self._hall.open(kind, lists, own)
        if len(own) == 1:
            return SoloCommunicator()
        return ThreadCommunicator(meeting, own.index(self._rank), self._timeout_seconds)


class ThreadCommunicator:
    """One thread's place in one meeting. Payloads are copied, so callers may reuse tensors."""

    def __init__(self, meeting: Meeting[torch.Tensor], place: int, timeout_seconds: float) -> None:
        self._meeting = meeting
        self._place = place
        self._timeout_seconds = timeout_seconds
        self._deadline: float | None = None

    @property
    def rank(self) -> int:
        """Place in the group."""
        return self._place

    @property
    def world_size(self) -> int:
        """Members of the group."""
        return self._meeting.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[...]` -> `[N, ...]`."""
        return torch.stack(self._meet("all_gather", tensor))

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` -> `[...]`, added in group order."""
        require_blocks("reduce_scatter", tensor, self.world_size)
        return sum_in_order([sent[self._place] for sent in self._meet("reduce_scatter", tensor)])

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, added in group order on each of them: equal bits."""
        return sum_in_order(self._meet("all_reduce", tensor))

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` -> `[N, ...]`."""
        require_blocks("all_to_all", tensor, self.world_size)
        return torch.stack([sent[self._place] for sent in self._meet("all_to_all", tensor)])

    def shift(self, tensor: torch.Tensor) -> Pending:
        """Deposits a copy and returns; `wait` blocks until all ranks have deposited theirs."""
        deadline, limit = self._until()
        ticket = self._meeting.enter(
            self._place, _call("shift", tensor.shape, tensor.dtype), _copy(tensor), deadline, limit
        )
        source, _ = ring_neighbours(self._place, self.world_size)
        return Transfer(lambda: self._meeting.collect(ticket)[source])

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Meets the receiver: returns when it has come."""
        require_peer("send", target, self._place, self.world_size)
        call = _call("transfer", tensor.shape, tensor.dtype)
        self._meeting.pair(self._place, target).meet(0, call, _copy(tensor), *self._until())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Meets the sender, whose tensor must have the announced shape and dtype."""
        require_peer("receive", source, self._place, self.world_size)
        call, nothing = _call("transfer", shape, dtype), torch.empty(0)
        return self._meeting.pair(source, self._place).meet(1, call, nothing, *self._until())[0]

    def set_deadline(self, deadline: float | None) -> None:
        """Monotonic time by which every later call must end; None: only the world's own limit."""
        self._deadline = deadline

    def _meet(self, op: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        call = _call(op, tensor.shape, tensor.dtype)
        return self._meeting.meet(self._place, call, _copy(tensor), *self._until())

    def _until(self) -> tuple[float, str]:
        """Monotonic time by which a call that begins now must end, and its name."""
        if self._deadline is not None:
            return self._deadline, "the deadline"
        limit = f"the group limit of {self._timeout_seconds} s"
        return time.monotonic() + self._timeout_seconds, limit


def _call(op: str, shape: Sequence[int], dtype: torch.dtype) -> Call:
    return Call(op, tuple(shape), str(dtype))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
