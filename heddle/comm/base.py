"""What ranks say to each other: one protocol, whatever carries it.

Axis by purpose: `tp` sums (weights), `pcp` gathers and restores (rows), `dcp` and `slice` merge
(context).

Legend: `N` ranks in the group in hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.layout.mesh import GroupKind


class Pending(Protocol):
    """A transfer under way; work may go on until its result is needed."""

    def wait(self) -> torch.Tensor:
        """What arrived; called exactly once, by the deadline set when it began."""
        ...


class Communicator(Protocol):
    """One rank's view of one group.

    Every member issues the same calls, in the same order, with equal shapes and dtypes. A group of
    one returns its input (with the leading axis where stated) and moves nothing; callers therefore
    treat results as read-only. Larger groups return fresh tensors. Inputs are not modified.

    Raises (all calls): `CollectiveTimeout` at the deadline, `RankFailed` when a peer is gone,
    `PlanMismatch` where the implementation can see that descriptors differ.
    """

    @property
    def rank(self) -> int:
        """Place in this group's ordered list."""
        ...

    @property
    def world_size(self) -> int:
        """Members of this group."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[...]` of each rank -> `[N, ...]`, in group order."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` -> `[...]`: the sum over ranks of their block for this rank, added in group
        order where possible.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, same on all of them."""
        ...

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` -> `[N, ...]`: block d goes to rank d; block s of the result came from rank
        s.
        """
        ...

    def shift(self, tensor: torch.Tensor) -> Pending:
        """Send to the next rank of the group (the last one to the first) while receiving the
        previous rank's tensor of equal shape and dtype; returns at once.

        The tensor may not change until `wait` has returned. Shifts of a group may overlap; they
        arrive in the order in which they began.
        """
        ...

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Hand a tensor to one rank of the group, which calls `receive`; returns once the tensor
        may be reused, which may be as late as the other rank's call.

        Raises:
            ValueError: `target` is this rank itself or outside the group.
        """
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """The tensor that a rank of the group sends here.

        Raises:
            ValueError: `source` is this rank itself or outside the group.
        """
        ...

    def set_deadline(self, deadline: float | None) -> None:
        """Monotonic time by which every later call must end; None: only the group's own limit."""
        ...


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The communicators of one rank, one per kind."""

    tp: Communicator
    pcp: Communicator
    dcp: Communicator
    slice: Communicator
    """The DCP members with this rank's PCP coordinate: they store the same kv heads and exchange
    query heads.
    """
    pp: Communicator
    """Stages: hidden rows are handed on."""
    ep: Communicator
    """Holders of whole experts: rows are dealt out and collected."""

    def of(self, kind: GroupKind) -> Communicator:
        """The communicator of a kind."""
        found: Communicator = getattr(self, kind)
        return found


class World(Protocol):
    """One rank's way to all its groups; made by an executor, before the rank's runner exists."""

    @property
    def global_rank(self) -> int:
        """Rank in the whole world."""
        ...

    def group(self, kind: GroupKind, members: Sequence[Sequence[int]]) -> Communicator:
        """Form this rank's group of a kind.

        Args:
            kind: name for traces and errors.
            members: all groups of this kind, each an ordered list of global ranks; together they
                tile the world. Every rank calls this with the same lists, in the same order of
                kinds.
        """
        ...
