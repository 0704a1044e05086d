"""Where Heddle keeps files between runs."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from heddle.errors import ConfigError


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/heddle`, where that variable is unset `~/.cache/heddle`.

    Raises:
        ConfigError: the variable is unset, and this user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named or Path.home() / ".cache") / "heddle"
    except RuntimeError as error:
        raise ConfigError(
            f"user {os.getuid()} has no home in which files are kept between runs: HOME is not "
            "set, and the system knows no such user; set XDG_CACHE_HOME to a folder of your own"
        ) from error


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
            if found.st_uid not in (0, os.getuid()) and not is_above:
                raise ConfigError(
                    f"compiled kernels are kept below {path}, which belongs to "
                    f"{_user_name(found.st_uid)}: another user can write there; set XDG_CACHE_HOME "
                    "to a folder of your own"
                )
            # As in /tmp: there nobody can put another folder in place of ours; files can be added.
            is_kept = is_above and found.st_mode & stat.S_ISVTX
            writers = "" if is_kept else other_writers(found)
            if writers:
                raise ConfigError(
                    f"compiled kernels are kept below {path}, whose mode is "
                    f"{stat.S_IMODE(found.st_mode):04o}: {writers} can write there, and only you "
                    f"may; run chmod go-w {path}, or set XDG_CACHE_HOME to a folder that is yours "
                    "alone"
                )


def other_writers(found: os.stat_result) -> str:
    """Who else can write to a folder, in words; empty: nobody.

    A group that only its user is in, as many systems make one for each of them, is nobody else, and
    neither is the group of root.

    Args:
        found: of the folder.
    """
    if found.st_mode & stat.S_IWOTH:
        return "another user"
    if found.st_mode & stat.S_IWGRP and found.st_gid and not _is_of_its_user(found.st_gid):
        return f"another user, of group {_group_name(found.st_gid)},"
    return ""


def default_dump_dir() -> Path:
    """Where a driver writes down what its ranks did before they failed."""
    return default_cache_dir() / "dumps"


def _is_of_its_user(group: int) -> bool:
    """It has the name of this user, and no other member."""
    try:
        known, name = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return known.gr_name == name and set(known.gr_mem) <= {name}


def _user_name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


def _group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)
