"""One rank's place in one group, over shared memory; the public face of `rounds` and `transfers`.

A collective of a usual decode step costs a copy into this rank's box, one number, and one copy or
sum out of all boxes. Sums run in group order on every rank: the same bits everywhere, and the same
as between threads.

Legend: `N` ranks in the group in hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from heddle.comm.base import Pending
from heddle.comm.rendezvous import Call
from heddle.comm.shared_memory.calls import MOST_KEPT, Boxes, Calls, PreparedCall
from heddle.comm.shared_memory.patience import Until
from heddle.comm.shared_memory.roll import Roll
from heddle.comm.shared_memory.rounds import Rounds
from heddle.comm.shared_memory.segment import digest_of
from heddle.comm.shared_memory.streams import Round, Streams
from heddle.comm.shared_memory.transfers import Transfers
from heddle.comm.transfers import Transfer, require_peer
from heddle.errors import CollectiveTimeout

_Long = Callable[[torch.Tensor, int, Round], torch.Tensor]


class SharedCommunicator:
    """See `Communicator`. Tensors are on the CPU. A tensor without elements moves nothing, and
    nobody waits for it.
    """

    def __init__(
        self,
        rounds: Rounds,
        transfers: Transfers,
        boxes: Boxes,
        roll: Roll,
        name: str,
        global_rank: int,
        members: str,
        timeout_seconds: float,
    ) -> None:
        self._rounds = rounds
        self._transfers = transfers
        self._streams = Streams(boxes)
        self._calls = Calls(boxes, members)
        self._members = members
        self._name = name
        self._roll = roll
        self._place = boxes.place
        self._size = boxes.world_size
        self._global_rank = global_rank
        self._timeout_seconds = timeout_seconds
        self._deadline: float | None = None
        self._known: dict[tuple[str, tuple[int, ...], torch.dtype], tuple[str, int]] = {}

    @property
    def rank(self) -> int:
        """Place in the group."""
        return self._place

    @property
    def world_size(self) -> int:
        """Members of the group."""
        return self._size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[...]` -> `[N, ...]`."""
        call = self._calls.of("all_gather", tensor, is_dealt=False)
        if call.received is None:
            return self._stream(call, self._streams.gather, tensor, (self._size, *tensor.shape))
        return call.received[self._exchange(call, tensor)].contiguous()  # they have gaps: a copy

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` -> `[...]`, added in group order."""
        call = self._calls.of("reduce_scatter", tensor, is_dealt=True)
        if call.received is None:
            return self._stream(call, self._streams.scatter_sum, tensor, tensor.shape[1:])
        return call.sum(self._exchange(call, tensor))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, added in group order on each of them: equal bits."""
        call = self._calls.of("all_reduce", tensor, is_dealt=False)
        if call.received is None:
            return self._stream(call, self._streams.sum, tensor, tensor.shape)
        return call.sum(self._exchange(call, tensor))

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` -> `[N, ...]`."""
        call = self._calls.of("all_to_all", tensor, is_dealt=True)
        if call.received is None:
            return self._stream(call, self._streams.deal, tensor, tensor.shape)
        return call.received[self._exchange(call, tensor)].contiguous()  # they have gaps: a copy

    def shift(self, tensor: torch.Tensor) -> Pending:
        """Puts what the lane has room for and returns; `wait` ends both directions."""
        if tensor.numel() == 0:
            return Transfer(tensor.clone)
        words, digest = self._transfer("shift", tensor.shape, tensor.dtype)
        self._check_begin(words)
        sent = _as_bytes(tensor)
        received = torch.empty_like(sent)
        land = self._transfers.begin_shift(words, digest, sent, received, self._until())

        def take() -> torch.Tensor:
            land()
            return received.view(tensor.dtype).view(tensor.shape)

        return Transfer(take)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Hand a tensor to one rank; returns when it has it."""
        require_peer("send", target, self._place, self._size)
        if tensor.numel() > 0:
            words, digest = self._transfer("transfer", tensor.shape, tensor.dtype)
            self._check_begin(words)
            self._transfers.send(words, digest, _as_bytes(tensor), target, self._until())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """The tensor that a rank sends here, which must have the announced shape and dtype."""
        require_peer("receive", source, self._place, self._size)
        received = torch.empty(tuple(shape), dtype=dtype)
        if received.numel() > 0:
            words, digest = self._transfer("transfer", shape, dtype)
            self._check_begin(words)
            self._transfers.receive(words, digest, _as_bytes(received), source, self._until())
        return received

    def set_deadline(self, deadline: float | None) -> None:
        """Monotonic time by which every later call must end; None: only the world's own limit."""
        self._deadline = deadline

    def _exchange(self, call: PreparedCall, tensor: torch.Tensor) -> int:
        """Put a tensor into this rank's box and wait for the others'; which of the two boxes."""
        rounds = self._rounds
        parity = (rounds.number + 1) & 1
        if call.is_empty:
            return parity
        if self._deadline is not None or self._roll.has_failed:
            self._check_begin(call.words)
        assert call.own is not None  # it fits
        call.own[parity].copy_(tensor)
        rounds.exchange(call.digest, call.words, self._until)
        return parity

    def _stream(
        self, call: PreparedCall, run: _Long, tensor: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        """A call that takes several rounds."""
        self._check_begin(call.words)
        flat = tensor.contiguous().view(*call.flat)
        until = self._until()

        def end_round() -> None:
            self._rounds.exchange(call.digest, call.words, lambda: until)

        return run(flat, (self._rounds.number + 1) & 1, end_round).view(shape)

    def _transfer(self, op: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[str, int]:
        """Words and digest of a transfer."""
        key = (op, tuple(shape), dtype)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            words = Call(op, tuple(shape), str(dtype)).words
            known = self._known[key] = words, digest_of(f"{words} {self._members}")
        return known

    def _check_begin(self, words: str) -> None:
        """Raise if a call cannot begin: the world has failed, or no time is left."""
        if self._roll.has_failed:
            self._roll.check(f"{self._name} {words}")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            text = f"{self._name} {words}: the deadline passed before it began"
            raise self._roll.fail(CollectiveTimeout(text))

    def _until(self) -> Until:
        """When a call that begins now must end."""
        if self._deadline is not None:
            return Until(self._global_rank, self._deadline, "the deadline")
        limit = f"the group limit of {self._timeout_seconds} s"
        return Until(self._global_rank, time.monotonic() + self._timeout_seconds, limit)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
