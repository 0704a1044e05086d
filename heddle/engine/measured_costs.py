"""The constants that `heddle doctor` measured on this machine, kept between runs.

    $XDG_CACHE_HOME/heddle/link-costs.json       {"machine": ..., "alpha": ..., "beta": ..., ...}
                           link-costs-shm.json   the same, where ranks share memory

A file that is not there, not readable, not ours, or of another machine (home folders are shared
between hosts) is no error: the engine says why it does not use it and takes the defaults.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from heddle.config.folders import default_cache_dir
from heddle.config.link_costs import SHARED_MEMORY_COSTS, LinkCosts

FILE_NAME = "link-costs.json"
_FILE_NAMES = {"shm": "link-costs-shm.json"}
_MAX_BYTES = 4096
"""Far above what is ever written; a larger file is not ours."""
_DEFAULTS = "defaults; heddle doctor without a model measures this machine"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    machine: str
    alpha: float
    beta: float
    flops: float
    memory: float
    request: float = LinkCosts().request
    """Not measured; files of before do not hold it."""


class Chosen(NamedTuple):
    """Constants, and the sentence that says where they come from."""

    costs: LinkCosts
    reason: str


def costs_path(cpu_comm_backend: str = "") -> Path:
    """Where the constants are kept, for each kind of link between ranks."""
    return default_cache_dir() / _FILE_NAMES.get(cpu_comm_backend, FILE_NAME)


def choose_costs(
    given: LinkCosts | None,
    path: Path | None = None,
    *,
    cpu_comm_backend: str = "",
    deterministic: bool = False,
) -> Chosen:
    """The constants an engine works with: those given, else those measured here, else defaults.

    Args:
        given: of the configuration.
        path: of the file; None: `costs_path(cpu_comm_backend)`.
        cpu_comm_backend: what connects the ranks; empty where they are no processes.
        deterministic: leave out what was measured, which another run may find changed.
    """
    defaults = SHARED_MEMORY_COSTS if cpu_comm_backend == "shm" else LinkCosts()
    if given is not None:
        return Chosen(given, "link costs: as given")
    if deterministic:
        return Chosen(defaults, "link costs: defaults, since deterministic")
    path = path or costs_path(cpu_comm_backend)
    try:
        return Chosen(read_costs(path), f"link costs: measured here, from {path}")
    except FileNotFoundError:
        return Chosen(defaults, f"link costs: {_DEFAULTS}")
    except (OSError, ValueError) as error:
        return Chosen(defaults, f"link costs: {_DEFAULTS}; {path} is ignored: {error}")


def read_costs(path: Path) -> LinkCosts:
    """Read what `store_costs` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is broken, not ours, or of another machine.
    """
    if not path.is_file() and path.exists():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    found = msgspec.json.decode(content, type=_File)
    if found.machine != machine_name():
        raise ValueError(f"it was measured on {found.machine!r}, and this is {machine_name()!r}")
    values = {name: getattr(found, name) for name in _NAMES}
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value}; it must be above 0 and finite")
    return LinkCosts(**values)


_NAMES = tuple(field.name for field in dataclasses.fields(LinkCosts))


def store_costs(costs: LinkCosts, path: Path | None = None) -> Path:
    """Write the constants; a reader sees the old file or the new one, never a part.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path = path or costs_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode(_File(machine=machine_name(), **dataclasses.asdict(costs)))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="costs-") as scratch:
        part = Path(scratch) / FILE_NAME
        part.write_bytes(content + b"\n")
        os.replace(part, path)
    return path


def machine_name() -> str:
    """What the constants depend on, without a name of host or user."""
    return f"{processor_name()}, {os.cpu_count()} cores"


def processor_name() -> str:
    """The model of the processor, as the system calls it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
