"""Where compiled kernels are kept between runs, and whether one is there already.

    <cache>/kernels/<operation>-<digest of the sources it is made of>/...

Numba itself notices a change in the file of an entry, but not in the functions that it calls. So
the digest covers every module of this room that an operation imports, directly or not.

Loads no compiler: a driver asks before it starts ranks.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from heddle.config.folders import default_cache_dir

_ROOM = Path(__file__).parent
_PREFIX = "heddle.kernels."
_ON_A_GPU = "triton"
"""Start of the names of modules that are no part of an operation's form for a CPU."""


def object_folder(operation: str) -> Path:
    """Folder of the object code of an operation, in this version of its sources and of numba.

    Args:
        operation: name of its folder in this room.
    """
    return default_cache_dir() / "kernels" / f"{operation}-{_digest(operation)}"


def is_cold(name: str) -> bool:
    """Whether nothing of an operation has been compiled yet.

    Args:
        name: `operation`, or `operation.form` for one entry of several.
    """
    operation, _, form = name.partition(".")
    pattern = f"*/*._{form.partition('_')[0]}-*.nbc" if form else "*/*.nbc"
    return not any(object_folder(operation).glob(pattern))


def operation_of(module: str) -> str:
    """The operation that a module belongs to; any other module counts as one by itself."""
    return module.removeprefix(_PREFIX).split(".")[0] if module.startswith(_PREFIX) else module


@cache
def _digest(operation: str) -> str:
    hasher = hashlib.sha256(_numba_version().encode())
    for path in sorted(sources(operation)):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:16]


def sources(operation: str) -> set[Path]:
    """Every file of this room that an operation's forms for a CPU are made of; of what is no
    operation, all of them.
    """
    folder = _ROOM / operation
    start = folder if folder.is_dir() else _ROOM
    waiting = [path for path in start.rglob("*.py") if not path.name.startswith(_ON_A_GPU)]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imports(path)
    return found


def _imports(path: Path) -> Iterator[Path]:
    """Files of this room that a file imports."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(_PREFIX):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in (str(node.module), *names):
                file = _ROOM.joinpath(*name.split(".")[2:]).with_suffix(".py")
                if file.is_file():
                    yield file


def _numba_version() -> str:
    try:
        return version("numba")
    except PackageNotFoundError:
        return "none"
