"""Process ranks of either kind for the laws of communicators: over gloo, and over shared memory.

A body is a module-level function of a world; it runs in one process for each rank, and what it
returns or raises comes back.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection, wait

import torch

from heddle.comm.shared_memory.segment import create_segment
from heddle.comm.shared_memory.world import create_shared_world
from heddle.comm.torch_group import create_torch_world
from tests.support.processes import LONG_SECONDS

LIMIT_SECONDS = LONG_SECONDS
"""Of a call without a deadline, and of meeting the other ranks."""
LIBRARIES = ("gloo", "shm")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
SHAPES = [(), (5,), (2, 0), (3, 2)]
# Every dtype, every shape, not their product: a call between processes takes milliseconds.
MANY = [*zip(DTYPES, SHAPES + SHAPES, strict=False), (torch.int64, (3, 2))]
FEW = [(torch.bfloat16, (3, 2)), (torch.int64, (5,))]


def create_world(library, rank, size, place, limit):
    """A world of either kind; `place` is a file store, or a path to the segment."""
    if library == "gloo":
        return create_torch_world(
            rank=rank,
            world_size=size,
            store_path=place,
            timeout_seconds=limit,
            longest_wait_seconds=4 * LIMIT_SECONDS,
            interface="lo",
        )
    return create_shared_world(
        rank=rank,
        world_size=size,
        descriptor=os.open(place, os.O_RDWR | os.O_CLOEXEC),
        timeout_seconds=limit,
    )


def rank_main(library, body, rank, size, place, limit, pipe: Connection):
    try:
        torch.set_num_threads(1)
        pipe.send("here")
        pipe.recv()
        world = create_world(library, rank, size, place, limit)
        result = body(world)
        world.destroy()
        world.destroy()
    except Exception as error:
        result = error
    pipe.send(result)


def run_processes(body, size, folder, library="gloo", limit=LIMIT_SECONDS):
    """Results of `body(world)` on each rank: values, exceptions, or None for a rank that died.

    Ranks form their world once all of them run: how long a process takes to start counts for no
    limit.
    """
    if library == "gloo":
        return _run(library, body, size, str(folder / "store"), limit)
    segment = create_segment(size)
    try:
        return _run(library, body, size, f"/proc/{os.getpid()}/fd/{segment}", limit)
    finally:
        os.close(segment)


def _run(library, body, size, place, limit):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.support.process_ranks"])
    ranks = []
    for rank in range(size):
        near, far = context.Pipe()
        process = context.Process(
            target=rank_main, args=(library, body, rank, size, place, limit, far), daemon=True
        )
        process.start()
        far.close()
        ranks.append((process, near))
    for _, pipe in ranks:
        assert pipe.recv() == "here"
    for _, pipe in ranks:
        pipe.send("begin")
    results = []
    for process, pipe in ranks:
        wait([pipe, process.sentinel], timeout=2 * LIMIT_SECONDS)
        try:
            results.append(pipe.recv() if pipe.poll() else None)
        except (EOFError, ConnectionResetError):
            results.append(None)
        process.join(LIMIT_SECONDS)
        assert not process.is_alive()
    return results


def packed(tensor):
    """Everything that makes two tensors equal bit for bit."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


def all_calls(world):
    """Moves and sums over groups in every kind of order, for all dtypes and shapes."""
    groups = [
        (world.group("tp", [[0, 1, 2]]), FEW),
        (world.group("dcp", [[2, 0, 1]]), MANY),
        (world.group("pcp", [[1], [2, 0]]), FEW),
    ]
    moves, sums, reduced = [], [], []
    for group, cases in groups:
        for dtype, shape in cases:
            generator = torch.Generator().manual_seed(10 * len(moves) + world.global_rank)
            size = group.world_size
            block = (torch.randn((size, *shape), generator=generator) * 50).to(dtype)
            moves.append(packed(group.all_gather(block[0])))
            moves.append(packed(group.all_to_all(block)))
            # A view that is not contiguous travels as its values.
            moves.append(packed(group.all_gather(block.expand(2, *block.shape).movedim(0, -1))))
            sums.append(packed(group.reduce_scatter(block)))
            reduced.append(packed(group.all_reduce(block)))
    return moves, sums, reduced, [group.rank for group, _ in groups]


def all_transfers(world):
    """Rings, two shifts in flight with a sum between, and a pipeline, in every kind of order."""
    groups = [
        (world.group("dcp", [[2, 0, 1]]), MANY),
        (world.group("pp", [[1], [2, 0]]), FEW),
    ]
    moves = []
    for group, cases in groups:
        size = group.world_size
        for dtype, shape in cases if size > 1 else []:
            generator = torch.Generator().manual_seed(len(moves))
            shards = (torch.randn((size, *shape, 2), generator=generator) * 50).to(dtype)
            held = shards[group.rank].movedim(-1, 0)  # a view that is not contiguous
            ring = [group.shift(held), group.shift(held + 1)]
            total = group.all_reduce(torch.tensor(group.rank))
            assert int(total) == size * (size - 1) // 2
            arrived = [ring[1].wait(), ring[0].wait()]
            for _ in range(size - 1):
                arrived.append(group.shift(arrived[-1]).wait())
            assert torch.equal(arrived[-1].movedim(0, -1), shards[group.rank])
            if group.rank > 0:
                arrived.append(group.receive(held.shape, dtype, group.rank - 1))
            if group.rank + 1 < size:
                group.send(arrived[-1], group.rank + 1)
            moves.append([packed(tensor) for tensor in arrived])
    return moves
