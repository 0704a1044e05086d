"""One of the ranks that `heddle doctor` starts: times collectives and prints what it found.

python -m heddle.cli.checkup_rank RANK NUM_RANKS STORE_PATH
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import psutil
import torch

from heddle.comm.base import Communicator
from heddle.comm.torch_group import create_torch_world

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = (4096, 1 << 20)
"""Bytes that each rank puts in."""
_REPEATS = 10


def main(argv: Sequence[str]) -> None:
    """Join, measure, list sockets, print one JSON document."""
    rank, num_ranks, store_path = int(argv[0]), int(argv[1]), argv[2]
    world = create_torch_world(
        rank=rank, world_size=num_ranks, store_path=store_path, interface="lo"
    )
    try:
        group = world.group("dcp", [list(range(num_ranks))])
        document = {"collectives": time_collectives(group), "sockets": listening_sockets()}
    finally:
        world.destroy()
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
    call(tensor)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call(tensor)
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
