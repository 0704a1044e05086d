"""A communicator that once makes another call than the one it was asked for.

It stands in front of the guard, where the code of a layer stands: what a defect there would ask
for, this asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from heddle.comm.base import Communicator, Pending
from heddle.faults.watch import RankWatch

_Call = Callable[[torch.Tensor], torch.Tensor]


class StrayCommunicator:
    """See the top."""

    def __init__(self, inner: Communicator, watch: RankWatch) -> None:
        self._inner = inner
        self._watch = watch

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
        """No graph may hold a call that goes astray once."""
        return False

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        return self._make(self._inner.all_gather, tensor, self._inner.all_reduce, _gathered_alone)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.reduce_scatter`."""
        return self._make(
            self._inner.reduce_scatter, tensor, self._inner.all_to_all, _scattered_alone
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        return self._make(self._inner.all_reduce, tensor, self._inner.all_gather, _alone)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_to_all`."""
        return self._make(self._inner.all_to_all, tensor, self._inner.reduce_scatter, _alone)

    def shift(self, tensor: torch.Tensor) -> Pending:
        """See `Communicator.shift`; never astray."""
        return self._inner.shift(tensor)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """See `Communicator.send`; never astray."""
        self._inner.send(tensor, target)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """See `Communicator.receive`; never astray."""
        return self._inner.receive(shape, dtype, source)

    def set_deadline(self, deadline: float | None) -> None:
        """See `Communicator.set_deadline`."""
        self._inner.set_deadline(deadline)

    def _make(
        self,
        call: _Call,
        tensor: torch.Tensor,
        other: _Call,
        alone: Callable[[torch.Tensor, Communicator], torch.Tensor],
    ) -> torch.Tensor:
        """The call, or what a rule makes of it.

        Args:
            call: asked for.
            tensor: handed in.
            other: another call of the same group.
            alone: a result of the right shape, without a word to the others.
        """
        for rule in self._watch.due(("call",)):
            if rule.action == "wrong_dtype":
                wider = torch.float64 if tensor.dtype != torch.float64 else torch.float32
                return call(tensor.to(wider)).to(tensor.dtype)
            if rule.action == "short_tensor":
                return call(tensor[..., :-1].contiguous())
            if rule.action == "swap_collectives":
                return other(tensor)
            if rule.action == "skip_collective":
                return alone(tensor, self._inner)
            call(tensor)  # a piece more than the plan has
        return call(tensor)


def _alone(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:  # noqa: ARG001
    return tensor.clone()


def _gathered_alone(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    return torch.stack([tensor] * group.world_size)


def _scattered_alone(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    return tensor[group.rank].clone()
