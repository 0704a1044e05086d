"""What the system knows of processes, for tests that count what is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """True while the process exists, a zombie included: it has not been reaped."""
    return os.path.exists(f"/proc/{pid}")


def is_running(pid: int) -> bool:
    """True while the process exists and has not ended; an orphan may stay a zombie for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> set[int]:
    """Direct children, zombies included."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid:
                found.add(int(entry.name))
    return found


def num_threads(pid: int) -> int:
    """Threads of a process, as the kernel counts them."""
    return len(os.listdir(f"/proc/{pid}/task"))


def num_descriptors(pid: int | str = "self") -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def listening_addresses(pids: Iterable[int]) -> list[str]:
    """Addresses on which these processes listen for TCP, as /proc spells them (hexadecimal)."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


def seconds_until(condition: Callable[[], bool], limit: float = 10.0) -> float:
    """Wait for a condition; how long it took, or the limit."""
    started = time.monotonic()
    while time.monotonic() - started < limit:
        if condition():
            return time.monotonic() - started
        time.sleep(0.005)
    return limit
