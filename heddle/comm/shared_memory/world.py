"""Ranks of one host that share a segment: the world, and the way to its groups.

The driver makes the segment (`segment.create_segment`) and gives each rank a descriptor; the ranks
need nothing else from it and no library of collectives.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain

import torch

from heddle.comm.base import Communicator
from heddle.comm.members import Members, frozen_members, own_members
from heddle.comm.shared_memory.calls import Boxes
from heddle.comm.shared_memory.communicator import SharedCommunicator
from heddle.comm.shared_memory.geometry import BOX_BYTES, ROUND_DATA, SLOT_BYTES
from heddle.comm.shared_memory.patience import Patience, sharpen_sleeps
from heddle.comm.shared_memory.roll import Roll
from heddle.comm.shared_memory.rounds import Rounds
from heddle.comm.shared_memory.segment import Segment
from heddle.comm.shared_memory.transfers import Transfers
from heddle.comm.solo import SoloCommunicator
from heddle.errors import PlanMismatch
from heddle.layout.mesh import GroupKind


def create_shared_world(
    *,
    rank: int,
    world_size: int,
    descriptor: int,
    timeout_seconds: float = 60.0,
    num_cores: int | None = None,
) -> SharedWorld:
    """Take a place in the segment; returns when every rank has.

    Args:
        rank: global rank of this process.
        world_size: number of processes, all on this host.
        descriptor: of the segment; the world's own from now on.
        timeout_seconds: the longest to meet the other ranks, and the longest that a call waits
            while no deadline is set.
        num_cores: that the ranks share; None: those this process may use.

    Raises:
        RankFailed: the ranks did not come together in time.
        HeddleError: the segment is not of this world.
    """
    segment = Segment(descriptor, world_size)
    roll = Roll(segment, rank)
    roll.await_all(timeout_seconds)
    sharpen_sleeps()
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    patience = Patience(roll, is_crowded=world_size > cores)
    return SharedWorld(segment, roll, patience, rank, timeout_seconds)


class SharedWorld:
    """One process's way to its groups; see `create_shared_world`."""

    def __init__(
        self, segment: Segment, roll: Roll, patience: Patience, rank: int, timeout_seconds: float
    ) -> None:
        self._segment = segment
        self._memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._roll = roll
        self._patience = patience
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._formed: dict[GroupKind, tuple[Members, Communicator]] = {}
        self._is_open = True

    @property
    def global_rank(self) -> int:
        """Rank in the whole world."""
        return self._rank

    def group(self, kind: GroupKind, members: Sequence[Sequence[int]]) -> Communicator:
        """This rank's group of a kind; see `World.group`.

        Raises:
            TopologyError: the lists do not tile the world.
            PlanMismatch: this rank or another one has formed the kind from other lists.
        """
        lists = frozen_members(self._segment.geometry.world_size, members)
        own = own_members(self._rank, lists)
        known, communicator = self._formed.get(kind, (lists, None))
        if known != lists:
            raise PlanMismatch(f"{kind} groups {lists} differ from the earlier {known}")
        if communicator is None:
            self._roll.form(kind, lists)
            communicator = self._form(kind, lists, own) if len(own) > 1 else SoloCommunicator()
            self._formed[kind] = lists, communicator
        return communicator

    def abort(self, error: BaseException) -> None:
        """End the world: the other ranks raise at their next call, or where they wait."""
        self._roll.abort(error)

    def destroy(self) -> None:
        """Leave; later calls do nothing."""
        if self._is_open:
            self._is_open = False
            self._roll.leave()
            self._segment.close()

    def _form(self, kind: GroupKind, lists: Members, own: tuple[int, ...]) -> SharedCommunicator:
        first = list(chain.from_iterable(lists)).index(own[0])
        geometry = self._segment.geometry
        slots = [geometry.slot(kind, first + place) for place in range(len(own))]
        place = own.index(self._rank)
        seat = (kind, own, place, slots)
        rounds = Rounds(self._segment, self._roll, self._patience, *seat)
        transfers = Transfers(self._segment, self._memory, self._roll, self._patience, *seat)
        return SharedCommunicator(
            rounds,
            transfers,
            Boxes(self._box(slots, 0), self._box(slots, 1), place),
            self._roll,
            kind,
            self._rank,
            f"among {list(own)} of {lists}",
            self._timeout_seconds,
        )

    def _box(self, slots: Sequence[int], parity: int) -> torch.Tensor:
        """One box of every member, [N, BOX_BYTES] of uint8."""
        offset = slots[0] + ROUND_DATA + parity * BOX_BYTES
        return self._memory.as_strided((len(slots), BOX_BYTES), (SLOT_BYTES, 1), offset)
