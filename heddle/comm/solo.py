"""A group of one: every collective is the identity and nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.comm.base import Communicator, Pending
from heddle.comm.blocks import require_blocks
from heddle.comm.members import frozen_members
from heddle.comm.transfers import Transfer, require_peer
from heddle.layout.mesh import GroupKind


class SoloCommunicator:
    """Communicator of a single rank. Results alias their input: treat both as read-only."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[...]` -> `[1, ...]`."""
        return tensor.unsqueeze(0)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[1, ...]` -> `[...]`."""
        require_blocks("reduce_scatter", tensor, 1)
        return tensor[0]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The input."""
        return tensor

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """The input, `[1, ...]`."""
        require_blocks("all_to_all", tensor, 1)
        return tensor

    def shift(self, tensor: torch.Tensor) -> Pending:
        """The ring of one: the input comes back."""
        return Transfer(lambda: tensor)

    def send(self, tensor: torch.Tensor, target: int) -> None:  # noqa: ARG002 - nobody takes it
        """There is nobody to send to.

        Raises:
            ValueError: always.
        """
        require_peer("send", target, 0, 1)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:  # noqa: ARG002 - nobody sends it
        """There is nobody to receive from.

        Raises:
            ValueError: always.
        """
        require_peer("receive", source, 0, 1)
        raise AssertionError("a group of one has no peer")

    def set_deadline(self, deadline: float | None) -> None:
        """Nothing is awaited, so no deadline can pass."""


class SoloWorld:
    """A world of one rank."""

    @property
    def global_rank(self) -> int:
        """Always 0."""
        return 0

    def group(self, kind: GroupKind, members: Sequence[Sequence[int]]) -> Communicator:  # noqa: ARG002 - the name serves traces
        """The group of rank 0 alone.

        Raises:
            TopologyError: `members` names other ranks.
        """
        frozen_members(1, members)
        return SoloCommunicator()
