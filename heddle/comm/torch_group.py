"""Ranks as processes, over torch.distributed (used in this file alone): gloo on CPU, NCCL on CUDA.

What torch leaves open is settled here. It may wait for half an hour; so every call is asynchronous
and waits until a deadline of ours. It sorts the members of a group, while our order is part of the
meaning; so blocks are permuted at the border. It notices neither a wrong dtype nor a swapped order;
callers compare plans before they call. (gloo ends the process when more bytes come than were asked
for.)
Moves travel as bytes, which makes every dtype equal. `reduce_scatter` is an all-to-all followed by
a sum in group order: the same bytes, and the same bits as between threads.

A process has one world at a time, because torch.distributed keeps its default group per process.

Legend: `N` ranks in the group in hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from heddle.comm.base import Communicator, Pending
from heddle.comm.blocks import require_blocks, sum_in_order
from heddle.comm.flight import Flight, Flights
from heddle.comm.members import frozen_members, own_members
from heddle.comm.solo import SoloCommunicator
from heddle.comm.transfers import Transfer, require_peer, ring_neighbours
from heddle.errors import RankFailed
from heddle.layout.mesh import GroupKind

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def create_torch_world(
    *,
    rank: int,
    world_size: int,
    store_path: str | None,
    device: torch.device | str = "cpu",
    timeout_seconds: float = 60.0,
    longest_wait_seconds: float | None = None,
    idle_timeout_seconds: float = 7 * 86400.0,
    interface: str | None = None,
) -> TorchWorld:
    """Join the process group of all ranks; returns when every rank has joined.

    Args:
        rank: global rank of this process.
        world_size: number of processes.
        store_path: a file that all ranks can reach and that did not exist before; it opens no port.
            None: the address that a launcher put into the environment.
        device: where tensors live; `cpu` chooses gloo, `cuda` NCCL.
        timeout_seconds: the longest to meet the other ranks, and the longest that a collective
            waits while no deadline is set.
        longest_wait_seconds: the longest that any deadline will be away; None: `timeout_seconds`.
            The library ends a collective at this age by itself.
        idle_timeout_seconds: the longest that `broadcast_bytes` waits for the next message.
        interface: network interface for gloo, for example `lo` on one host; None: gloo's choice.

    Raises:
        RankFailed: the ranks did not come together in time.
    """
    device = torch.device(device)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo has no other setting for it
    store = None
    if store_path is not None:
        store = dist.FileStore(store_path, world_size)  # type: ignore[attr-defined]  # no stub
    try:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            init_method="env://" if store is None else None,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=idle_timeout_seconds))
    except RuntimeError as error:
        raise RankFailed(
            f"rank {rank}: {world_size} ranks did not form a group within {timeout_seconds} s: "
            f"{error}"
        ) from error
    longest = max(timeout_seconds, longest_wait_seconds or 0.0)
    return TorchWorld(rank, world_size, device, timeout_seconds, longest, control)


class TorchWorld:
    """One process's way to its groups; see `create_torch_world`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_seconds: float,
        longest_wait_seconds: float,
        control: dist.ProcessGroup,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._longest_wait_seconds = longest_wait_seconds
        self._control = control

    @property
    def global_rank(self) -> int:
        """Rank in the whole world."""
        return self._rank

    def group(self, kind: GroupKind, members: Sequence[Sequence[int]]) -> Communicator:
        """This rank's group of a kind; see `World.group`. Groups of one need no process group.

        Raises:
            TopologyError: the lists do not tile the world.
            RankFailed: the members did not come together in time.
        """
        lists = frozen_members(self._world_size, members)
        own = own_members(self._rank, lists)
        communicator: Communicator = SoloCommunicator()
        for ranks in lists:
            if len(ranks) == 1:
                continue
            # torch wants every rank to take part in forming every group, members or not.
            made = self._form(kind, ranks)
            if ranks is own:
                communicator = TorchCommunicator(
                    made, kind, ranks, ranks.index(self._rank), self._device, self._timeout_seconds
                )
        return communicator

    def broadcast_bytes(self, payload: bytes | None, src: int = 0) -> bytes:
        """Send a message from one rank to all; the others pass None and wait however long it takes.

        Raises:
            RankFailed: a rank is gone.
        """
        sent = b"" if payload is None else payload
        size = torch.tensor(len(sent))
        self._control_call("broadcast_bytes", lambda: self._broadcast(size, src))
        if int(size) == 0:
            return b""
        body = _to_tensor(sent) if self._rank == src else torch.empty(int(size), dtype=torch.uint8)
        self._control_call("broadcast_bytes", lambda: self._broadcast(body, src))
        return body.numpy().tobytes()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """A message of each rank, in rank order; sizes may differ.

        Raises:
            RankFailed: a rank is gone.
        """
        sizes = [torch.tensor(0) for _ in range(self._world_size)]
        own_size = torch.tensor(len(payload))
        self._control_call("all_gather_bytes", lambda: self._gather(sizes, own_size))
        largest = max(int(size) for size in sizes)
        if largest == 0:
            return [b""] * self._world_size
        padded = _to_tensor(payload.ljust(largest, b"\0"))
        bodies = [torch.empty(largest, dtype=torch.uint8) for _ in range(self._world_size)]
        self._control_call("all_gather_bytes", lambda: self._gather(bodies, padded))
        pairs = zip(bodies, sizes, strict=True)
        return [body[: int(size)].numpy().tobytes() for body, size in pairs]

    def destroy(self) -> None:
        """Leave the process group; later calls do nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _form(self, kind: GroupKind, ranks: Sequence[int]) -> dist.ProcessGroup:
        try:
            made: dist.ProcessGroup = dist.new_group(
                sorted(ranks),
                timeout=timedelta(seconds=self._longest_wait_seconds),
                group_desc=kind,
            )
        except RuntimeError as error:
            raise RankFailed(f"{kind} group {list(ranks)} was not formed: {error}") from error
        return made

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Any:
        return dist.broadcast(tensor, src, group=self._control, async_op=True)

    def _gather(self, outs: list[torch.Tensor], own: torch.Tensor) -> Any:
        return dist.all_gather(outs, own, group=self._control, async_op=True)

    def _control_call(self, op: str, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise RankFailed(f"{op}: a rank is gone: {error}") from error


class TorchCommunicator:
    """One rank's place in one process group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        kind: GroupKind,
        ranks: tuple[int, ...],
        place: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._group = group
        self._kind = kind
        self._ranks = ranks
        self._place = place
        self._device = device
        self._flights = Flights(timeout_seconds)
        ordered = sorted(ranks)
        self._is_sorted = list(ranks) == ordered
        # torch's block i belongs to the i-th lowest rank, ours to the i-th of the list.
        self._to_torch = torch.tensor([ranks.index(rank) for rank in ordered])
        self._from_torch = torch.tensor([ordered.index(rank) for rank in ranks])

    @property
    def rank(self) -> int:
        """Place in the group."""
        return self._place

    @property
    def world_size(self) -> int:
        """Members of the group."""
        return len(self._ranks)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[...]` -> `[N, ...]`."""
        sent = _as_bytes(tensor)
        received = sent.new_empty(self.world_size * sent.numel())
        blocks = received.view(self.world_size, sent.numel())
        outs = [blocks[place] for place in self._to_torch.tolist()]
        if sent.numel() > 0:
            self._call(
                "all_gather",
                tensor,
                lambda: dist.all_gather(outs, sent, group=self._group, async_op=True),
            )
        return received.view(tensor.dtype).view(self.world_size, *tensor.shape)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` -> `[...]`, added in group order."""
        require_blocks("reduce_scatter", tensor, self.world_size)
        return sum_in_order(self._exchange("reduce_scatter", tensor).unbind(0))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, equal bits on all; 16-bit floats are added in float32."""
        wide = torch.float32 if tensor.dtype in _HALF_DTYPES else tensor.dtype
        total = tensor.to(wide, copy=True, memory_format=torch.contiguous_format)
        if total.numel() > 0:
            self._call(
                "all_reduce",
                tensor,
                lambda: dist.all_reduce(total, group=self._group, async_op=True),
            )
        return total.to(tensor.dtype)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` -> `[N, ...]`."""
        require_blocks("all_to_all", tensor, self.world_size)
        return self._exchange("all_to_all", tensor)

    def shift(self, tensor: torch.Tensor) -> Pending:
        """Begins both directions; `wait` ends them. The tensor must stay as it is until then."""
        if tensor.numel() == 0:
            return Transfer(lambda: tensor.clone())
        sent = _as_bytes(tensor)
        received = torch.empty_like(sent)
        source, target = ring_neighbours(self._place, self.world_size)
        flight = self._transfer(
            "shift",
            tensor,
            self._move(dist.isend, sent, target),
            self._move(dist.irecv, received, source),
        )
        held = (sent, received)  # until both directions are done, whatever torch holds

        def take() -> torch.Tensor:
            self._flights.land(flight)
            return held[1].view(tensor.dtype).view(tensor.shape)

        return Transfer(take)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Hand a tensor to one rank; gloo is done when that rank asks for it."""
        require_peer("send", target, self._place, self.world_size)
        if tensor.numel() > 0:
            move = self._move(dist.isend, _as_bytes(tensor), target)
            self._flights.land(self._transfer(f"send to {self._ranks[target]}", tensor, move))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """The tensor that a rank sends here; it must have the announced size."""
        require_peer("receive", source, self._place, self.world_size)
        received = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if received.numel() > 0:
            move = self._move(dist.irecv, _as_bytes(received), source)
            what = f"receive from {self._ranks[source]}"
            self._flights.land(self._transfer(what, received, move))
        return received

    def set_deadline(self, deadline: float | None) -> None:
        """Monotonic time by which every later call must end; None: only the group's own limit."""
        self._flights.deadline = deadline

    def _exchange(self, op: str, tensor: torch.Tensor) -> torch.Tensor:
        sent = _as_bytes(self._permuted(tensor, self._to_torch))
        received = torch.empty_like(sent)
        if sent.numel() > 0:
            self._call(
                op,
                tensor,
                lambda: dist.all_to_all_single(received, sent, group=self._group, async_op=True),
            )
        return self._permuted(received.view(tensor.dtype).view(tensor.shape), self._from_torch)

    def _permuted(self, blocks: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return blocks if self._is_sorted else blocks.index_select(0, order.to(blocks.device))

    def _move(self, op: Callable[..., Any], data: torch.Tensor, place: int) -> dist.P2POp:
        return dist.P2POp(op, data, self._ranks[place], self._group)

    def _transfer(self, op: str, tensor: torch.Tensor, *moves: dist.P2POp) -> Flight:
        return self._flights.begin(
            self._words(op, tensor), lambda: dist.batch_isend_irecv(list(moves))
        )

    def _call(self, op: str, tensor: torch.Tensor, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it."""
        self._flights.land(self._flights.begin(self._words(op, tensor), lambda: [start()]))

    def _words(self, op: str, tensor: torch.Tensor) -> str:
        shape, ranks = list(tensor.shape), list(self._ranks)
        return f"{self._kind} {op} of {tensor.dtype} {shape} among {ranks}"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _to_tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
