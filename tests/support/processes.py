"""What the system knows of processes, for tests that count what is left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONG_SECONDS = 120.0
"""More than anything takes here, on the slowest and busiest machine: a limit that must not be what
ends a wait. Whatever ended within half of it was ended by something else."""


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


def command_line(pid: int) -> bytes:
    """The words that a process was started with; a fork has those of its parent."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def num_threads(pid: int) -> int:
    """Threads of a process, as the kernel counts them."""
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors_of(pid: int) -> Counter[str]:
    """What the open descriptors of a process lead to; one that is closed meanwhile is left out."""
    found: Counter[str] = Counter()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found[os.readlink(f"/proc/{pid}/fd/{number}")] += 1
    return found


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return descriptors_of(os.getpid()).total()


def own_bytes() -> int:
    """Bytes in memory of this process's own pages, without those of files that it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@contextmanager
def nothing_left(*others: int) -> Iterator[None]:
    """What runs inside leaves no descriptor and no thread that was not there before.

    In this process that holds at once: whoever closes has closed. Other processes, named by
    `others`, see a moment later that what they served has ended, and are waited for. What somebody
    else lets go of meanwhile is no part of it, so a count may well be lower than before.
    """
    gc.collect()  # what earlier tests dropped is no part of it
    threads = set(threading.enumerate())
    before = {pid: descriptors_of(pid) for pid in (os.getpid(), *others)}
    yield
    gc.collect()

    def more(pid: int) -> Counter[str]:
        return descriptors_of(pid) - before[pid]

    left = more(os.getpid())
    assert not left, f"descriptors left open: {left}"
    assert not set(threading.enumerate()) - threads
    for pid in others:
        seconds_until(lambda pid=pid: not more(pid))  # type: ignore[misc]
        left = more(pid)
        assert not left, f"descriptors left open in process {pid}: {left}"


def listening_addresses(pids: Iterable[int]) -> list[str]:
    """Addresses on which these processes listen for TCP, as /proc spells them (hexadecimal)."""
    targets = [target for pid in pids for target in descriptors_of(pid)]
    inodes = {target[8:-1] for target in targets if target.startswith("socket:[")}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


def seconds_until(condition: Callable[[], bool], limit: float = LONG_SECONDS) -> float:
    """Wait for a condition; how long it took, or the limit."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < limit:
        if condition():
            return waited
        time.sleep(0.005)
    return limit


def await_file(path: Path) -> None:
    """Wait until another rank has made a file: its word that it has come so far.

    Raises:
        ValueError: it does not come.
    """
    if seconds_until(path.exists) >= LONG_SECONDS:
        raise ValueError(f"nobody gave the signal {path.name}")
