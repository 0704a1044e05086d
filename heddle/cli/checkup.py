"""What `heddle doctor` looks at and measures on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from heddle.attention.backends import BACKENDS
from heddle.cli.cost_fit import fit_costs
from heddle.comm.shared_memory.segment import create_segment, refusal
from heddle.engine.measured_costs import processor_name

PACKAGES = ("heddle-llm", "torch", "numpy", "msgspec", "safetensors", "gguf", "tokenizers")
NUM_RANKS = 2
_RANK_TIMEOUT_SECONDS = 60
_ARRAY_BYTES = 1 << 27
_REPEATS = 5


def examine() -> dict[str, Any]:
    """The whole document; takes some seconds, most of them for two ranks that start and talk."""
    ranks = _measure_ranks()
    first = ranks[0]
    return {
        "machine": machine(),
        "versions": versions(),
        "backends": backends(),
        "sockets": [socket for rank in ranks for socket in rank["sockets"]],
        "bandwidth": bandwidth(_ARRAY_BYTES),
        "collectives": [
            {"link": link, **row} for link, rows in first["collectives"].items() for row in rows
        ],
        "costs": {
            link: dataclasses.asdict(fit_costs(rows, **first["rates"]))
            for link, rows in first["collectives"].items()
        },
    }


def machine() -> dict[str, Any]:
    """Processor, memory and limits, without a name of host or user."""
    memory = psutil.virtual_memory()
    shared = Path("/dev/shm")  # noqa: S108 - only its size is read
    return {
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total,
        "free_memory_bytes": memory.available,
        "shared_memory_free_bytes": shutil.disk_usage(shared).free if shared.exists() else 0,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cuda_devices": torch.cuda.device_count(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def backends() -> list[dict[str, Any]]:
    """Each attention backend, and why it cannot be used where it cannot."""
    rows = []
    for name, create in BACKENDS.items():
        try:
            create(1)
            reason = ""
        except Exception as error:  # any failure to load is the finding
            reason = f"{type(error).__name__}: {error}"
        rows.append({"name": name, "available": not reason, "reason": reason})
    return rows


def bandwidth(num_bytes: int) -> dict[str, float]:
    """Bytes per second of this process, over arrays larger than any cache.

    Args:
        num_bytes: of an array.
    """
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    return {
        "read_bytes_per_second": num_bytes / _seconds(source.sum),
        "copy_bytes_per_second": 2 * num_bytes / _seconds(lambda: target.copy_(source)),
    }


def _seconds(call: Callable[[], object]) -> float:
    """Median time of a call, once it is warm."""
    call()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


def _measure_ranks() -> list[dict[str, Any]]:
    """Start ranks that time collectives; each lists the sockets it listens on meanwhile."""
    with tempfile.TemporaryDirectory() as folder, _shared_segment() as segment:
        words = [str(NUM_RANKS), str(Path(folder) / "store"), *map(str, segment)]
        ranks = [
            subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "heddle.cli.checkup_rank", str(rank), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=segment,
            )
            for rank in range(NUM_RANKS)
        ]
        try:
            return [_answer(rank) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


@contextmanager
def _shared_segment() -> Iterator[list[int]]:
    """The descriptor of memory that ranks may share; none where they cannot."""
    if refusal(NUM_RANKS, psutil.virtual_memory().available) is not None:
        yield []
        return
    segment = create_segment(NUM_RANKS)
    try:
        yield [segment]
    finally:
        os.close(segment)


def _answer(rank: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = rank.communicate(timeout=_RANK_TIMEOUT_SECONDS)
    if rank.returncode != 0:
        raise RuntimeError(f"a rank that measures collectives ended with {rank.returncode}: {err}")
    answer: dict[str, Any] = json.loads(out)
    return answer
