"""One of the ranks that `heddle doctor` starts: times collectives and arithmetic and prints what it
found. All ranks work at once, on their share of the cores, as they do in an engine, and over
everything that may connect them there.

python -m heddle.cli.checkup_rank RANK NUM_RANKS STORE_PATH [SEGMENT_DESCRIPTOR]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import psutil
import torch

from heddle.comm.base import Communicator
from heddle.comm.shared_memory.world import create_shared_world
from heddle.comm.torch_group import create_torch_world

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = (4096, 1 << 20)
"""Bytes that each rank puts in."""
_REPEATS = 10
_ROWS, _WIDTH = 512, 1024
"""Rows of a step, and a usual width of a dense layer."""
_ARRAY_BYTES = 1 << 26
"""Larger than a share of any cache."""


def main(argv: Sequence[str]) -> None:
    """Join, measure, list sockets, print one JSON document."""
    rank, num_ranks, store_path = int(argv[0]), int(argv[1]), argv[2]
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    with ExitStack() as worlds:
        gloo = create_torch_world(
            rank=rank, world_size=num_ranks, store_path=store_path, interface="lo"
        )
        worlds.callback(gloo.destroy)
        groups = {"gloo": gloo.group("dcp", [list(range(num_ranks))])}
        if len(argv) > 3:
            shared = create_shared_world(rank=rank, world_size=num_ranks, descriptor=int(argv[3]))
            worlds.callback(shared.destroy)
            groups["shm"] = shared.group("dcp", [list(range(num_ranks))])
        document = {
            "collectives": {name: time_collectives(group) for name, group in groups.items()},
            "sockets": listening_sockets(),
            "rates": time_arithmetic(gloo.group("tp", [list(range(num_ranks))])),
        }
    print(json.dumps(document))


def time_collectives(group: Communicator) -> list[dict[str, Any]]:
    """Median seconds of every operation at every size."""
    rows = []
    for operation in OPERATIONS:
        for num_bytes in SIZES:
            # Leading axis N: what reduce-scatter and all-to-all ask for, and no harm to the others.
            shape = (group.world_size, num_bytes // 4 // group.world_size)
            seconds = _median_seconds(group, operation, torch.ones(shape))
            rows.append(
                {
                    "op": operation,
                    "ranks": group.world_size,
                    "bytes": num_bytes,
                    "seconds": seconds,
                }
            )
    return rows


def _median_seconds(group: Communicator, operation: str, tensor: torch.Tensor) -> float:
    call = getattr(group, operation)
    return _median(lambda: call(tensor))


def time_arithmetic(group: Communicator) -> dict[str, float]:
    """Operations a second in a float32 matrix product, bytes a second read from memory; one rank,
    while the others do the same.
    """
    rows, weights = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    array = torch.ones(_ARRAY_BYTES // 4)
    start = torch.ones(group.world_size)
    group.all_reduce(start)  # together from here on
    return {
        "flops": 2 * _ROWS * _WIDTH * _WIDTH / _median(lambda: rows @ weights),
        "memory": _ARRAY_BYTES / _median(array.sum),
    }


def _median(call: Callable[[], object]) -> float:
    """Median seconds of a call, once it is warm."""
    call()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


def listening_sockets() -> list[dict[str, Any]]:
    """Addresses on which this process accepts connections."""
    return [
        {"address": connection.laddr.ip, "port": connection.laddr.port}
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
