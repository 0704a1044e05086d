"""A file of weights in the address space, of which only what is being copied stays in memory.

Pages of a mapped file count as memory of the process until they are dropped. A rank that loads
keeps its parameters, not the file as well, so each use of a range drops the one before.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from heddle.models.weights.source import Span


class MappedFile:
    """A file, mapped; views are made of `buffer`.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is empty.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Copy-on-write, because torch wants a writable buffer; it is never written.
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._used: Span = (0, 0)

    def use(self, first: int, last: int) -> None:
        """Say that bytes `[first, last)` are read next, and those named before no longer.

        A view of the latter stays good: touched again, it is read from disk again.
        """
        start, end = -(-self._used[0] // mmap.PAGESIZE), self._used[1] // mmap.PAGESIZE
        if end > start and hasattr(self.buffer, "madvise"):
            size = (end - start) * mmap.PAGESIZE
            self.buffer.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, size)
        self._used = (first, last)

    def prefetch(self, first: int, last: int) -> None:
        """Start reading bytes `[first, last)` from disk, in the background."""
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(self.buffer, "madvise"):
            self.buffer.madvise(mmap.MADV_WILLNEED, start, last - start)
