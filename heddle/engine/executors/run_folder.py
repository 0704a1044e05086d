"""A folder in which the ranks of one host find each other while they start: private, and not left.

    heddle-run-XXXXXXXX/lock     held by the driver for as long as it lives
    heddle-run-XXXXXXXX/store    by which ranks over gloo meet

It is gone once the ranks are connected. A driver that is killed before has ranks that remove it; if
they die too, with the machine for example, the next start does: whoever can take the lock knows
that its owner is gone, whatever processes have its number now.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "heddle-run-"
_LOCK = "lock"
_YOUNG_SECONDS = 10.0
"""For as long a folder may not have its lock yet."""


@contextmanager
def run_folder() -> Iterator[str]:
    """A fresh one, 0700, removed at the end.

    Raises:
        OSError: the system gives none.
    """
    remove_leftovers()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        # Not inherited by any child: the lock goes with this process, however that ends.
        lock = os.open(Path(folder, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(lock)


def remove_leftovers() -> None:
    """Remove what dead drivers of this user left; what cannot be removed stays."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    found = path.lstat()
    is_young = abs(time.time() - found.st_mtime) < _YOUNG_SECONDS
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or is_young:
        return
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # its owner did not get as far
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, an OSError: it lives
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
