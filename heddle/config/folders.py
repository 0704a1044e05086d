"""Where Heddle keeps files between runs."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from heddle.errors import ConfigError


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/heddle`, where that variable is unset `~/.cache/heddle`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heddle"


def check_cache_dir() -> None:
    """See that nobody else has put anything there: compiled kernels are kept in it, and run.

    Raises:
        ConfigError: another user can write to the folder, or to one that it lies in.
    """
    folder = default_cache_dir().absolute()
    for path in (folder / "kernels", folder, *folder.parents):
        with suppress(OSError):  # it is not there yet, or cannot be read either
            found = path.stat()
            is_above = path in folder.parents
            # As in /tmp: there nobody can put another folder in place of ours; files can be added.
            is_kept = is_above and found.st_mode & stat.S_ISVTX
            is_open = found.st_mode & stat.S_IWOTH and not is_kept
            is_ours = found.st_uid in (0, os.getuid()) or is_above
            if is_open or not is_ours:
                raise ConfigError(
                    f"compiled kernels are kept below {path}, where another user can write; make "
                    "it yours alone (chmod o-w), or set XDG_CACHE_HOME to a folder that is"
                )


def default_dump_dir() -> Path:
    """Where a driver writes down what its ranks did before they failed."""
    return default_cache_dir() / "dumps"
