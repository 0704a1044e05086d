"""The memory that all ranks of a host map: nameless from the first moment to the last.

A driver makes a memfd and hands its descriptor to the ranks as it hands them their channel. It has
no name in any folder and no limit but memory, and the kernel frees it with the last process that
holds it, however that one ends: nothing can be left behind. Its size is sealed, so no rank can pull
a page from under another.

Memory model. Everything here is plain stores and loads: a writer fills its box and then raises a
number; a reader sees the number and then reads the box. x86 keeps stores in order and loads in
order (TSO), and what Python does between two statements keeps compilers from swapping them. ARM and
POWER promise neither: they need a release and an acquire barrier around the number, which Python
cannot express. There `refusal` says no; never use this on such a machine.

Source: Intel SDM volume 3A, 9.2.2; AMD APM volume 2, 7.2.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import platform
import struct

from heddle.comm.shared_memory.geometry import MAGIC, WORD_BYTES, Geometry
from heddle.errors import HeddleError

_ORDERED_MACHINES = ("x86_64", "AMD64")
_LARGEST_SHARE = 4
"""The segment may grow to one in so many bytes of free memory, were every page of it touched."""
_HEADER = struct.Struct("<QQ")
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def refusal(world_size: int, free_memory_bytes: int, *, machine: str | None = None) -> str | None:
    """Why ranks of this host cannot share memory; None: they can.

    Args:
        world_size: ranks, all on this host.
        free_memory_bytes: of this host.
        machine: processor's architecture; None: this one's.
    Example:
        >>> refusal(2, 1 << 34, machine="aarch64")
        'aarch64 does not keep stores in order'
    """
    machine = platform.machine() if machine is None else machine
    if machine not in _ORDERED_MACHINES:
        return f"{machine} does not keep stores in order"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        os.close(os.memfd_create("heddle"))
    except OSError as error:
        return f"memfd_create is refused: {error.strerror}"
    needed = Geometry(world_size).num_bytes
    if needed * _LARGEST_SHARE > free_memory_bytes:
        return (
            f"{world_size} ranks may come to share {needed >> 20} MiB, more than a quarter of the "
            f"{free_memory_bytes >> 20} MiB that are free"
        )
    return None


def create_segment(world_size: int) -> int:
    """A descriptor of fresh shared memory for a world; whoever holds one can map it.

    Raises:
        OSError: the system gives none.
    """
    size = Geometry(world_size).num_bytes
    descriptor = os.memfd_create("heddle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, _HEADER.pack(MAGIC, world_size), 0)
        seals = sum(getattr(fcntl, name) for name in _SEALS)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Segment:
    """The segment, mapped into this process."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        """Map it; the descriptor is this object's from now on.

        Args:
            descriptor: from `create_segment`.
            world_size: for which it must have been made.

        Raises:
            HeddleError: it was made for another world, or is something else.
        """
        self.geometry = Geometry(world_size)
        self.descriptor = descriptor
        found = os.pread(descriptor, _HEADER.size, 0)
        expected = _HEADER.pack(MAGIC, world_size)
        if found != expected or os.fstat(descriptor).st_size != self.geometry.num_bytes:
            raise HeddleError(
                f"the shared segment begins with {found.hex()}, one for {world_size} ranks of this "
                f"version begins with {expected.hex()}"
            )
        self.memory = mmap.mmap(descriptor, self.geometry.num_bytes)
        self.octets = memoryview(self.memory)
        self.words = self.octets.cast("Q")
        """Each is read and written in one piece; addressed by `offset // WORD_BYTES`."""

    def text(self, offset: int, limit: int) -> str:
        """A description that ends before the first zero byte."""
        raw = bytes(self.octets[offset : offset + limit])
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")

    def write_text(self, offset: int, limit: int, text: str) -> None:
        """Write a description, cut to fit, and its end."""
        raw = text.encode()[: limit - 1] + b"\0"
        self.octets[offset : offset + len(raw)] = raw

    def close(self) -> None:
        """Give the descriptor back; the memory goes when nothing views it any more."""
        os.close(self.descriptor)


def digest_of(words: str) -> int:
    """64 bits that are equal on ranks that mean the same."""
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


def word_index(offset: int) -> int:
    """Place of a word, from its offset in bytes."""
    return offset // WORD_BYTES
