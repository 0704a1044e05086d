"""What a thread brings close before it computes: query panels, and tiles of keys and values.

    query   [lanes of a unit, Dq]  ->  panels [Dq, 16], transposed
    keys    [T, Dq + gap], values [T, Dv + gap]: widened to float32, without holes, and 0 where no
            row of the unit sees a key

Legend: `T` keys of a tile, `Dq`, `Dv` key and value width.
"""

from __future__ import annotations

import numba
import numpy as np

from heddle.kernels.compiled import inner, pointer
from heddle.kernels.paged_decode.widen import from_bfloat16, from_float16, from_fp8, from_int8
from heddle.kernels.tiled_attention.panels import WIDTH, clear, copy
from heddle.kernels.tiled_attention.words import (
    BLOCK_SIZE,
    ELEMENT,
    END,
    FIRST,
    GROUPED_LANES,
    KEY,
    KEY_HEAD,
    KEY_ROW,
    KEY_WIDTH,
    PARTS,
    QUERY,
    QUERY_LANE,
    QUERY_ROW,
    TABLE_BLOCKS,
    TABLE_OF_ROW,
    TABLES,
    UNTIL,
    VALUE,
    VALUE_HEAD,
    VALUE_IN_KEY,
    VALUE_ROW,
    VALUE_START,
    VALUE_WIDTH,
)

GAP = 16
"""Floats between rows of a tile, lest they all fall on the same sets of the cache."""
MAX_PARTS = 16
ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "fp8_e4m3": 4}
"""Types of stored elements, as the kernel knows them."""


@inner
def lanes_of(w, group):
    """Lanes of a kv head."""
    until = numba.carray(pointer(w[UNTIL]), (group + 2,), np.int64)
    lanes = numba.carray(pointer(w[GROUPED_LANES]), (until[group + 1],), np.int64)
    return lanes[until[group] :]


@inner
def pack_query(w, unit, panels, bounds):
    """Fill the panels of a unit, and the range of keys of each lane; the number of lanes.

    Lanes of a panel that is not full repeat the last one.
    """
    lanes, width = lanes_of(w, unit[2]), w[KEY_WIDTH]
    first = numba.carray(pointer(w[FIRST]), (unit[1],), np.int64)
    end = numba.carray(pointer(w[END]), (unit[1],), np.int64)
    total = (unit[1] - unit[0]) * len(lanes)
    for place in range((total + WIDTH - 1) // WIDTH * WIDTH):
        known = min(place, total - 1)
        row, lane = unit[0] + known // len(lanes), lanes[known % len(lanes)]
        bounds[0, place], bounds[1, place] = first[row], end[row]
        start = w[QUERY] + 4 * (row * w[QUERY_ROW] + lane * w[QUERY_LANE])
        source = numba.carray(pointer(start), (width,), np.float32)
        at = panels + 4 * (place // WIDTH * WIDTH * width + place % WIDTH)
        target = numba.carray(pointer(at), (width * WIDTH,), np.float32)
        for d in range(width):
            target[d * WIDTH] = source[d]
    return total


@inner
def _seen(w, unit, start, count, seen):
    """Mark the keys of a tile that some row of the unit sees; True, and no marks: all of them."""
    first = numba.carray(pointer(w[FIRST]), (unit[1],), np.int64)
    end = numba.carray(pointer(w[END]), (unit[1],), np.int64)
    for row in range(unit[0], unit[1]):
        if first[row] <= start and start + count <= end[row]:
            return True
    seen[:count] = 0
    for row in range(unit[0], unit[1]):
        for t in range(max(first[row] - start, 0), min(end[row] - start, count)):
            seen[t] = 1
    return False


@inner
def _widen(w, row, start, count, target):
    """Elements [start, start + count) of a stored row, as float32 at an address."""
    element, parts = w[ELEMENT], numba.carray(pointer(w[PARTS]), (MAX_PARTS,), np.int64)
    if element == 0:
        copy(target, row + 4 * start, count)
    elif element == 1:
        from_bfloat16(row, start, count, parts, target)
    elif element == 2:
        from_float16(row, start, count, parts, target)
    elif element == 3:
        from_int8(row, start, count, parts, target)
    else:
        from_fp8(row, start, count, parts, target)


@inner
def copy_tile(w, unit, head, start, count, keys, values, seen):
    """Keys and values [start, start + count) of the unit's sequence, those that are seen."""
    key_width, value_width, size = w[KEY_WIDTH], w[VALUE_WIDTH], w[BLOCK_SIZE]
    table_of_row = numba.carray(pointer(w[TABLE_OF_ROW]), (unit[1],), np.int64)
    table_at = w[TABLES] + 8 * w[TABLE_BLOCKS] * table_of_row[unit[0]]
    table = numba.carray(pointer(table_at), (w[TABLE_BLOCKS],), np.int64)
    is_whole, is_apart = _seen(w, unit, start, count, seen), w[VALUE_IN_KEY] < 0
    block, place = start // size, start % size
    for t in range(count):
        if place == size:
            block, place = block + 1, 0
        key, value = keys + 4 * t * (key_width + GAP), values + 4 * t * (value_width + GAP)
        if is_whole or seen[t] != 0:
            slot = table[block] * size + place
            _widen(w, w[KEY] + slot * w[KEY_ROW] + head * w[KEY_HEAD], 0, key_width, key)
            if is_apart:
                row = w[VALUE] + slot * w[VALUE_ROW] + head * w[VALUE_HEAD]
                _widen(w, row, w[VALUE_START], value_width, value)
        else:
            clear(key, key_width)
            if is_apart:
                clear(value, value_width)
        place += 1
