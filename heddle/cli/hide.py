"""Keys leave the command line and the environment of this process as soon as they are read.

The kernel shows every user the words that a process was started with, and to its owner its first
environment; both are memory of the process itself. What is started later inherits neither.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path

VARIABLE = "HEDDLE_API_KEY"
_STAT = Path("/proc/self/stat")
_BEGIN = 45
"""Behind the name in /proc/self/stat: begin and end of the words, then of the environment."""


def hide_keys(keys: Collection[str]) -> None:
    """Overwrite keys where the kernel shows them; where there is no such table, only forget them.

    Args:
        keys: as they were given by `--api-key` or its variable.
    """
    os.environ.pop(VARIABLE, None)
    if not keys or not _STAT.exists():
        return
    # The name of the program stands in brackets and may hold anything, blanks included.
    numbers = _STAT.read_text(errors="replace").rpartition(")")[2].split()
    begin, end, env_begin, env_end = map(int, numbers[_BEGIN : _BEGIN + 4])
    shown = {key.encode("utf-8", "surrogateescape") for key in keys}
    for word, address in _words(begin, end):
        for key in shown:
            if word == key or word.endswith(b"=" + key):
                ctypes.memset(address + len(word) - len(key), ord("*"), len(key))
    name = VARIABLE.encode() + b"="
    for word, address in _words(env_begin, env_end):
        if word.startswith(name):
            ctypes.memset(address + len(name), ord("*"), len(word) - len(name))


def _words(begin: int, end: int) -> list[tuple[bytes, int]]:
    """Words of a piece of memory that end with zeros, and where each begins."""
    found, address = [], begin
    for word in ctypes.string_at(begin, end - begin).split(b"\0"):
        found.append((word, address))
        address += len(word) + 1
    return found
