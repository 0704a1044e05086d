"""Forgets compiled kernels of sources that nobody runs any more.

Every version of an operation's sources has a folder of its own (`object_cache`), so old ones would
pile up. A folder that is used is stamped; when another version of the operation is about to be
compiled, those that have had no stamp for long go. Several processes may do so at once: a folder is
first renamed, which one of them does, and a process that looks for it then compiles anew.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from heddle.kernels.object_cache import is_cold, object_folder

UNUSED_SECONDS = 30 * 24 * 3600.0
"""A folder without a stamp for so long is of old sources."""
_DOOMED = ".removed-"


def stamp(names: Iterable[str]) -> None:
    """Say that operations are used; forget old versions of those that are to be compiled.

    Args:
        names: `operation`, or `operation.form`.
    """
    names = list(names)
    for operation in {name.partition(".")[0] for name in names if not is_cold(name)}:
        with suppress(OSError):  # a cache that is read-only, or another process was quicker
            os.utime(object_folder(operation))
    for operation in {name.partition(".")[0] for name in names if is_cold(name)}:
        forget(object_folder(operation))


def forget(folder: Path) -> list[Path]:
    """Remove other versions of an operation that have not been used for long.

    Args:
        folder: of the version in use, there or not; it stays.
    Returns:
        The folders that were removed by this process.
    """
    operation = folder.name.rpartition("-")[0]
    removed = []
    for other in folder.parent.glob(f"{operation}-*"):
        if other == folder or not _is_unused(other):
            continue
        doomed = folder.parent / f"{_DOOMED}{os.getpid()}-{other.name}"
        with suppress(OSError):
            other.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            removed.append(other)
    return removed


def _is_unused(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > UNUSED_SECONDS
    except OSError:  # gone meanwhile
        return False
