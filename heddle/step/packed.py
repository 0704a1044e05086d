"""Block tables as they travel: little-endian int32, one id after another.

A long context has thousands of blocks, and every rank reads every table in every step. As bytes a
table is copied by a message and hashed by a digest at the speed of memory, and never taken apart.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ID = np.dtype("<i4")


def pack_table(blocks: Sequence[int]) -> bytes:
    """Block ids, each 0 <= id < 2**31, as bytes.

    Example:
        >>> pack_table([3, 258]).hex()
        '0300000002010000'
    """
    packed = array("i", blocks)  # four times as fast as numpy on a short list
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_table(packed: bytes) -> npt.NDArray[np.int64]:
    """The ids again.

    Example:
        >>> unpack_table(pack_table([3, 258])).tolist()
        [3, 258]
    """
    return np.frombuffer(packed, dtype=_ID).astype(np.int64)


def packed_part(packed: bytes, start: int, end: int | None = None) -> bytes:
    """Ids [start, end) of a table; None: to its end.

    Example:
        >>> unpack_table(packed_part(pack_table([3, 258, 7]), 1)).tolist()
        [258, 7]
    """
    return packed[start * _ID.itemsize : None if end is None else end * _ID.itemsize]


def packed_length(packed: bytes) -> int:
    """Ids of a table."""
    return len(packed) // _ID.itemsize
