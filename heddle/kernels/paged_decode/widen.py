"""Stored elements of a row as float32, for kernels that copy rows before they meet them.

Each function takes the address of the stored row of one head, a range of its elements, the parts of
a quantised row, and the address of a scratch row; it returns the address of the first element as
float32.

`parts`: how many there are, then the element at which each ends; behind the last lie the scales.

Legend of 16-bit floats: bfloat16 is the upper half of a float32. float16, with its sign moved up
and the rest shifted to where float32 has it, is too small by 2^112: subnormals included, a product
mends it. e4m3 likewise, by 2^120; codes are never its NaN, which the scale carries.
"""

from __future__ import annotations

import numba
import numpy as np

from heddle.kernels.compiled import bits_as_float, inner, pointer

_HALF_SCALE = np.float32(2.0**112)
_E4M3_SCALE = np.float32(2.0**120)


@inner
def from_bfloat16(row, start, count, parts, scratch):  # noqa: ARG001
    """The lower half is zero."""
    bits = numba.carray(pointer(row + 2 * start), (count,), np.uint16)
    out = numba.carray(pointer(scratch), (count,), np.uint32)
    for i in range(count):
        out[i] = np.uint32(bits[i]) << np.uint32(16)
    return scratch


@inner
def from_float16(row, start, count, parts, scratch):  # noqa: ARG001
    """Exponents of all ones (inf, NaN) stay all ones."""
    bits = numba.carray(pointer(row + 2 * start), (count,), np.int16)
    out = numba.carray(pointer(scratch), (count,), np.float32)
    for i in range(count):
        wide = np.int32(bits[i])
        magnitude = (wide & np.int32(0x7FFF)) << np.int32(13)
        value = bits_as_float(np.int32(magnitude)) * _HALF_SCALE
        if magnitude >= np.int32(0x0F800000):
            value = bits_as_float(np.int32(magnitude | np.int32(0x7F800000)))
        out[i] = -value if wide < 0 else value
    return scratch


@inner
def _part_end(parts, element):
    """(number of the part of an element, where that part ends)."""
    part = 0
    while parts[1 + part] <= element:
        part += 1
    return part, parts[1 + part]


@inner
def _scales_of(row, parts):
    """Float32 scales, which may lie at any byte."""
    return numba.carray(pointer(row + parts[parts[0]]), (parts[0],), np.float32)


@inner
def from_int8(row, start, count, parts, scratch):
    """Codes times the scale of their part."""
    codes = numba.carray(pointer(row), (start + count,), np.int8)
    out = numba.carray(pointer(scratch), (count,), np.float32)
    scales = _scales_of(row, parts)
    done = start
    while done < start + count:
        part, end = _part_end(parts, done)
        scale = scales[part]
        end = min(end, start + count)
        for i in range(done, end):
            out[i - start] = np.float32(codes[i]) * scale
        done = end
    return scratch


@inner
def from_fp8(row, start, count, parts, scratch):
    """Codes s eeee mmm times the scale of their part."""
    codes = numba.carray(pointer(row), (start + count,), np.int8)
    out = numba.carray(pointer(scratch), (count,), np.float32)
    scales = _scales_of(row, parts)
    done = start
    while done < start + count:
        part, end = _part_end(parts, done)
        scale = scales[part] * _E4M3_SCALE
        end = min(end, start + count)
        for i in range(done, end):
            wide = np.int32(codes[i])
            value = bits_as_float(np.int32((wide & np.int32(0x7F)) << np.int32(20)))
            out[i - start] = (-value if wide < 0 else value) * scale
        done = end
    return scratch
