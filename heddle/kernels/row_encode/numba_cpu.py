"""Encoding on a CPU in one pass, bit for bit as the reference does it.

Rows of float32, contiguous; others go to the reference. Here nothing may be reordered or fused: a
quotient that lies half-way between two codes must stay there.

Legend: see `reference`.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
import numpy.typing as npt
import torch

from heddle.kernels.calls import call, is_plain
from heddle.kernels.compiled import entry, given, num_threads, pointer, share, thread_index
from heddle.kernels.row_encode import reference
from heddle.kernels.row_encode.reference import LARGEST, SMALLEST
from heddle.layout.cache_rows import RowFormat

exactly = numba.njit(fastmath=False, error_model="numpy", boundscheck=False)
"""Says so: else a function takes over the freedoms of its caller."""
_LARGEST, _SMALLEST = np.float32(LARGEST), np.float32(SMALLEST)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_LEAST_NORMAL = np.uint32(121 << 23)
"""2^-6 as bits; below it, codes are multiples of 2^-9."""
_SPREAD = np.float32(2.0**14)
"""A number added to it is rounded to a multiple of 2^-9."""
_LAST_BITS = np.uint32(0xF)
_ROUND_DOWN = np.uint32((1 << 19) - 1)
_REBIAS = np.uint32(120 << 23)


@exactly
def _largest(bits):
    """Bits of `max |x|`: those of positive floats are in order, infinity and NaN behind them."""
    most = np.uint32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & _MAGNITUDE)
    return most


@exactly
def _int8(row, codes, scale):
    for i in range(len(row)):
        codes[i] = np.uint8(np.int32(np.rint(row[i] / scale)))


@exactly
def _e4m3(row, codes, scale, quotients, sums):
    """Quotients of at most 448; those below the least normal number are rounded by a sum."""
    count = len(row)
    for i in range(count):
        quotient = row[i] / scale
        quotients[i] = quotient
        sums[i] = abs(quotient) + _SPREAD
    given_bits, sum_bits = quotients.view(np.uint32), sums.view(np.uint32)
    for i in range(count):
        bits = given_bits[i]
        size = bits & _MAGNITUDE
        odd = (size >> np.uint32(20)) & np.uint32(1)
        normal = (size - _REBIAS + _ROUND_DOWN + odd) >> np.uint32(20)
        code = sum_bits[i] & _LAST_BITS if size < _LEAST_NORMAL else normal
        codes[i] = np.uint8(code | ((bits >> np.uint32(24)) & np.uint32(0x80)))


@exactly
def _part(row, codes, scale, peak, room):
    """Codes of a part, and its scale in `scale[0]`."""
    most = np.empty(1, np.uint32)
    most[0] = _largest(row.view(np.uint32))
    if most[0] >= _INFINITY:
        codes[:] = 0
        scale[0] = np.float32(np.nan)
        return
    scale[0] = max(min(most.view(np.float32)[0], _LARGEST) / peak, _SMALLEST)
    if peak == np.float32(127.0):
        _int8(row, codes, scale[0])
    else:
        _e4m3(row, codes, scale[0], room[0], room[1])


@entry
def _encode(address):
    """Words: rows, stored, ends of parts, number of rows, W, P, is_int8."""
    w = given(address, 7)
    width, parts = w[4], w[5]
    ends = numba.carray(pointer(w[2]), (parts,), np.int64)
    peak = np.float32(127.0 if w[6] != 0 else 448.0)
    room = np.empty((2, width), np.float32)
    first, end = share(w[3], thread_index(), num_threads())
    for r in range(first, end):
        stored = w[1] + r * (width + 4 * parts)
        row = numba.carray(pointer(w[0] + 4 * r * width), (width,), np.float32)
        codes = numba.carray(pointer(stored), (width,), np.uint8)
        scales = numba.carray(pointer(stored + width), (parts,), np.float32)
        start = 0
        for p in range(parts):
            _part(row[start : ends[p]], codes[start : ends[p]], scales[p : p + 1], peak, room)
            start = ends[p]


def encode(rows: torch.Tensor, row_format: RowFormat, *, num_threads: int = 1) -> torch.Tensor:
    """See `reference.encode`."""
    if not is_plain(rows):
        return reference.encode(rows, row_format)
    *leading, width = rows.shape
    stored = torch.empty((*leading, row_format.width), dtype=torch.uint8)
    ends, ends_at = _ends(row_format.parts)
    words = (
        rows.data_ptr(),
        stored.data_ptr(),
        ends_at,
        rows.numel() // width,
        width,
        len(ends),
        int(row_format.dtype == "int8"),
    )
    call(_encode, words, rows.numel(), num_threads)
    return stored


@cache
def _ends(parts: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], int]:
    """`[P]`: the element at which each part ends; and its address."""
    ends = np.cumsum(parts)
    return ends, ends.ctypes.data
