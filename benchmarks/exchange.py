"""W3: calls between two rank processes, over memory that they share and over gloo's sockets.

    python benchmarks/exchange.py [--quick] [--save]

Two processes with one thread and one core each hold both worlds and make the same calls over both,
A B B A; medians are of single calls on rank 0. `merge` is what a decode step does in each layer
when queries travel: one row of 9 heads of 64 values, and more rows of the same.

    AG+RS   all-gather of lse [n, 9], reduce-scatter of partials [2, n, 9, 64]
    A2A     all-to-all of partials with their lse, [2, n, 9, 65]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from support import Report, parser

from heddle.cli.quantities import quantity
from heddle.comm.base import Communicator
from heddle.comm.shared_memory.segment import create_segment
from heddle.comm.shared_memory.world import create_shared_world
from heddle.comm.torch_group import create_torch_world

HEADS, HEAD_DIM = 9, 64
SIZES = tuple(1 << shift for shift in range(10, 23, 2))
"""Bytes that a rank puts into a call."""
ROWS = (1, 8, 64, 512)
"""Of a merge; at one row a rank's partials are 4.5 KiB."""
ROUNDS = 3
SAMPLE_SECONDS = 0.04
LIBRARIES = ("shm", "gloo")
Call = Callable[[Communicator], object]


def calls(is_quick: bool) -> dict[str, Call]:
    """Every timed call, by name and size."""
    found: dict[str, Call] = {}
    for size in SIZES[:2] if is_quick else SIZES:
        rows = torch.ones(2, size // 8)
        found[f"all_gather {size}"] = lambda group, x=rows: group.all_gather(x)
        found[f"reduce_scatter {size}"] = lambda group, x=rows: group.reduce_scatter(x)
        found[f"all_reduce {size}"] = lambda group, x=rows: group.all_reduce(x)
        found[f"all_to_all {size}"] = lambda group, x=rows: group.all_to_all(x)
        found[f"shift {size}"] = lambda group, x=rows: group.shift(x).wait()
    for num_rows in ROWS[:1] if is_quick else ROWS:
        lse = torch.ones(num_rows, HEADS)
        partials = torch.ones(2, num_rows, HEADS, HEAD_DIM)
        packed = torch.ones(2, num_rows, HEADS, HEAD_DIM + 1)
        found[f"merge AG+RS {num_rows}"] = lambda group, a=lse, b=partials: (
            group.all_gather(a),
            group.reduce_scatter(b),
        )
        found[f"merge A2A {num_rows}"] = lambda group, x=packed: group.all_to_all(x)
    return found


def sample(call: Call, group: Communicator, count: int) -> list[float]:
    """Seconds of single calls; both ranks make as many."""
    found = []
    for _ in range(count):
        started = time.perf_counter()
        call(group)
        found.append(time.perf_counter() - started)
    return found


def count_for(call: Call, group: Communicator) -> int:
    """Calls that fill a sample; the slower rank's count, so that both make as many."""
    call(group)
    seconds = torch.tensor(statistics.median(sample(call, group, 5)))
    slowest = float(group.all_gather(seconds).max())
    return max(8, min(500, int(SAMPLE_SECONDS / slowest)))


def rank_main(arguments: argparse.Namespace) -> None:
    """Time all calls; rank 0 prints medians of seconds."""
    torch.set_num_threads(1)
    rank = arguments.rank
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # on one core they would time its scheduler
    shared = create_shared_world(
        rank=rank, world_size=2, descriptor=arguments.segment, num_cores=len(cores)
    )
    sockets = create_torch_world(
        rank=rank, world_size=2, store_path=arguments.store, interface="lo"
    )
    groups = {
        "shm": shared.group("dcp", [[0, 1]]),
        "gloo": sockets.group("dcp", [[0, 1]]),
    }
    medians: dict[str, dict[str, float]] = {}
    for name, call in calls(arguments.quick).items():
        counts = {library: count_for(call, groups[library]) for library in LIBRARIES}
        times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
        for _ in range(arguments.rounds or ROUNDS):
            for library in (*LIBRARIES, *reversed(LIBRARIES)):
                times[library] += sample(call, groups[library], counts[library])
        medians[name] = {library: statistics.median(found) for library, found in times.items()}
    shared.destroy()
    sockets.destroy()
    if rank == 0:
        print(json.dumps(medians))


def measure(words: Sequence[str]) -> dict[str, dict[str, float]]:
    """Run both ranks."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        segment = create_segment(2)
        ends.callback(os.close, segment)
        places = ["--store", str(Path(folder) / "store"), "--segment", str(segment)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *words, *places, "--rank", str(rank)],
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[segment],
            )
            for rank in range(2)
        ]
        for process in ranks:
            ends.callback(process.kill)
        out = [process.communicate(timeout=300)[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise RuntimeError("a rank failed; its words are above")
        found: dict[str, dict[str, float]] = json.loads(out[0])
        return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--store", help=argparse.SUPPRESS)
    made.add_argument("--segment", type=int, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.rank is not None:
        rank_main(arguments)
        return 0
    report = Report("exchange", "Calls between two ranks")
    medians = measure(sys.argv[1:])
    rows: list[list[Any]] = []
    for name, times in medians.items():
        op, size = name.rsplit(" ", 1)
        amount = f"{size} rows" if "merge" in op else quantity("bytes", int(size))
        shm, gloo = times["shm"], times["gloo"]
        rows.append([op, amount, shm * 1e6, gloo * 1e6, gloo / shm])
    report.table("medians", ["call", "size", "shm us", "gloo us", "gloo / shm"], rows)
    usual = medians["merge AG+RS 1"]["gloo"]
    for way in ("AG+RS", "A2A"):
        ours = medians[f"merge {way} 1"]["shm"]
        report.target("W3", f"merge of one row by {way}: us", ours * 1e6, at_most=30)
        report.target("W3", f"{way}: times faster than gloo AG+RS", usual / ours, at_least=10)
    return report.finish(arguments, {"seconds": medians})


if __name__ == "__main__":
    raise SystemExit(main())
