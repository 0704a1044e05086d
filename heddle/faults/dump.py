"""What all ranks did last, as one file per failure: written by the driver, read by `doctor --dump`.

It holds counts, shapes and names of calls, and one line of an error. That line is a rank's own: it
may name a file or a value. All else has no token, no text and no path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from heddle.config.faults import FaultRule
from heddle.errors import ConfigError, quoted
from heddle.faults.page import Standing

SCHEMA = 1
NUM_STEPS = 4
"""Whose calls are kept: the one that failed, and those before it."""
MAX_FILES = 16
"""The oldest go when there are more."""
_MAX_BYTES = 1 << 28
_PATTERN = "dump-*.json"


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """The document."""

    schema: int
    written: str
    """Local date and time."""
    cause: str
    """The rank that failed first, and the first line of its error, as the log has it."""
    labels: tuple[str, ...]
    """Of the ranks."""
    groups: dict[str, tuple[tuple[int, ...], ...]]
    """Who talks to whom: lists of global ranks, by kind."""
    ranks: tuple[Standing, ...]


def create_dump(
    cause: str,
    labels: Sequence[str],
    groups: dict[str, tuple[tuple[int, ...], ...]],
    standings: Sequence[Standing],
) -> Dump:
    """A document of this moment, with the last steps of each rank.

    Args:
        cause: the rank that failed first, and its error; the first line is kept.
        labels: of all ranks.
        groups: who talks to whom.
        standings: of the ranks that can be seen.
    """
    kept = [
        msgspec.structs.replace(
            standing,
            calls=tuple(c for c in standing.calls if c.step > standing.step - NUM_STEPS),
        )
        for standing in standings
    ]
    return Dump(
        schema=SCHEMA,
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        cause=cause.partition("\n")[0],
        labels=tuple(labels),
        groups=groups,
        ranks=tuple(kept),
    )


def write_dump(dump: Dump, folder: Path, rules: Collection[FaultRule] = ()) -> Path:
    """Write a file that only this user may read, and drop old ones.

    Args:
        dump: the document.
        folder: of all dumps; made if it is missing.
        rules: `disk_full` among them fails this, on purpose.
    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    if any(rule.action == "disk_full" for rule in rules):
        raise OSError(errno.ENOSPC, "injected: no space left on device")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    body = msgspec.json.encode(dump)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**12:012d}"
    path = folder / f"dump-{stamp}.json"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
    for old in sorted(folder.glob(_PATTERN))[:-MAX_FILES]:
        with contextlib.suppress(OSError):  # another driver drops old ones too
            old.unlink()
    return path


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """The document of a file.

    Raises:
        ConfigError: there is none, or it is something else.
    """
    try:
        with open(path, "rb") as file:
            body = file.read(_MAX_BYTES)
        dump = msgspec.json.decode(body, type=Dump)
    except OSError as error:
        raise ConfigError(f"dump {quoted(str(path))} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{quoted(str(path))} is no dump of this version: {error}; give a file that a failed "
            "engine named in its log"
        ) from error
    if dump.schema != SCHEMA:
        raise ConfigError(
            f"{quoted(str(path))} has schema {dump.schema}; this version reads {SCHEMA}"
        )
    return dump
