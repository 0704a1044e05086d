"""Passes on what ranks write to stdout and stderr, each line with the rank's prefix.

    2026-11-29T22:41:07.123Z INFO rank1 tp1 pcp0 dcp1 e0 text

Lines of the logging module begin with their level already; whatever else appears there (a warning
of a library, the last words of an abort) is worth a WARNING.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.connection import wait

from heddle.engine.line_sink import LineSink

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_KEPT_LINES = 60
_CHUNK_BYTES = 1 << 16


def format_line(line: str, label: str, epoch: int, now: datetime) -> str:
    """A rank's line as the log shows it.

    Args:
        line: without its line break.
        label: the rank and its coordinates.
        epoch: of the engine.
        now: in UTC.
    Example:
        >>> now = datetime(2026, 11, 29, 22, 41, 7, 123456, UTC)
        >>> format_line("INFO ready", "rank1 tp1 pcp0 dcp1", 0, now)
        '2026-11-29T22:41:07.123Z INFO rank1 tp1 pcp0 dcp1 e0 ready'
    """
    level, _, text = line.partition(" ")
    if level not in _LEVELS:
        level, text = "WARNING", line
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S") + f".{now.microsecond // 1000:03d}Z"
    return f"{stamp} {level} {label} e{epoch} {text}"


class OutputRelay:
    """One thread that reads the output pipes of all ranks."""

    def __init__(self, labels: Sequence[str]) -> None:
        """Make a pipe for each label; `write_end` belongs to the rank, `start` begins to read."""
        self.epoch = 0
        self._labels = tuple(labels)
        self._pipes = [os.pipe() for _ in labels]
        self._stop_read, self._stop_write = os.pipe()
        self._tails = [deque[str](maxlen=_KEPT_LINES) for _ in labels]
        self._partial = [b"" for _ in labels]
        self._sink = LineSink(lambda: sys.stderr)
        self._thread = threading.Thread(target=self._run, name="heddle-output-relay", daemon=True)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self._labels)

    def write_end(self, rank: int) -> int:
        """Descriptor for the rank's stdout and stderr."""
        return self._pipes[rank][1]

    def read_from(self, rank: int, descriptor: int) -> None:
        """Read a rank's output from there, a socket to another host, instead of its pipe; before
        `start`. The descriptor is duplicated.
        """
        os.dup2(descriptor, self._pipes[rank][0], inheritable=False)

    def start(self) -> None:
        """Close the write ends, which the ranks have by now, and begin to read."""
        self._close_write_ends()
        self._thread.start()

    def tail(self, rank: int) -> str:
        """The last lines of a rank; complete once the relay is closed."""
        return "\n".join(self._tails[rank])

    def close(self) -> None:
        """Read what is left, end the thread and free the pipes."""
        os.close(self._stop_write)
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._close_write_ends()
        for read_end, _ in self._pipes:
            os.close(read_end)
        os.close(self._stop_read)

    def _close_write_ends(self) -> None:
        for _, write_end in self._pipes:
            os.close(write_end)

    def _run(self) -> None:
        rank_of = {read_end: rank for rank, (read_end, _) in enumerate(self._pipes)}
        for read_end in rank_of:
            os.set_blocking(read_end, False)
        open_ends = set(rank_of)
        stopping = False
        while True:
            ready = wait([*open_ends, self._stop_read], 0 if stopping else None)
            stopping = self._stop_read in ready
            readable = open_ends.intersection(ready)
            if stopping and not readable:
                break
            for read_end in readable:
                try:
                    piece = os.read(read_end, _CHUNK_BYTES)
                except BlockingIOError:
                    continue
                except OSError:  # the host at the other end is gone, or silent for too long
                    piece = b""
                if not piece:
                    open_ends.discard(read_end)
                self._take(rank_of[read_end], piece)
        for rank, partial in enumerate(self._partial):
            if partial:
                self._show(rank, partial)

    def _take(self, rank: int, piece: bytes) -> None:
        *lines, self._partial[rank] = (self._partial[rank] + piece).split(b"\n")
        if len(self._partial[rank]) > _CHUNK_BYTES:  # no line break in sight
            lines.append(self._partial[rank])
            self._partial[rank] = b""
        for line in lines:
            self._show(rank, line)

    def _show(self, rank: int, line: bytes) -> None:
        text = line.decode("utf-8", "backslashreplace")
        self._tails[rank].append(text)
        shown = format_line(text, self._labels[rank], self.epoch, datetime.now(UTC))
        # Of the program's stderr as it is now. A rank must not block on whoever reads that, nor on
        # a full disk: it would be taken for hung.
        self._sink.write(shown)
