"""Lines for people, written where they may be read late, or never.

A program must not stop because nobody reads what it says: a pipe without a reader is full after
64 KiB, a terminal can be held, a disk has an end. A line that cannot be written soon is dropped;
the first one that can be written again comes behind a line that tells how many were.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import TextIO

from heddle.errors import counted

PATIENCE_MILLISECONDS = 50
"""For a reader that is behind. Once it has let this pass, nothing is waited for until it reads."""
_AT_ONCE_BYTES = select.PIPE_BUF
"""That a pipe takes without blocking, if it takes anything."""


def dropped_note(count: int) -> str:
    """That lines are missing.

    Example:
        >>> dropped_note(2)
        'WARNING 2 lines are missing here: nobody read them, or there was no room for them'
    """
    return (
        f"WARNING {counted(count, 'line is', 'lines are')} missing here: nobody read them, or "
        "there was no room for them"
    )


class LineSink:
    """Writes lines; its user sees to it that one thread at a time does."""

    def __init__(
        self, stream: Callable[[], TextIO | None], note: Callable[[int], str] = dropped_note
    ) -> None:
        """Write nothing yet.

        Args:
            stream: where lines go, asked for each: a program may replace or close it.
            note: of a number of dropped lines, the line that tells of them.
        """
        self._stream, self._note = stream, note
        self._num_dropped = 0
        self._is_torn = False  # the last line written has no end

    def write(self, line: str) -> None:
        """Write a line and its break; or drop it, where that would block or fails."""
        if self._num_dropped and self._put(self._note(self._num_dropped)):
            self._num_dropped = 0
        if self._num_dropped or not self._put(line):
            self._num_dropped += 1

    def _put(self, line: str) -> bool:
        try:
            stream = self._stream()
            if stream is None:
                return False
            try:
                descriptor = stream.fileno()
            except OSError:  # a stream in memory, which never blocks
                stream.write(f"{line}\n")
                return True
            return self._put_bytes(descriptor, f"{line}\n".encode("utf-8", "backslashreplace"))
        except (OSError, ValueError, AttributeError):  # no room, nobody there, or closed
            return False

    def _put_bytes(self, descriptor: int, data: bytes) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        left = b"\n" * self._is_torn + data
        while left:
            if not poll.poll(0 if self._num_dropped else PATIENCE_MILLISECONDS):
                return False
            written = os.write(descriptor, left[:_AT_ONCE_BYTES])
            left = left[written:]
            self._is_torn = bool(left)
        return True
