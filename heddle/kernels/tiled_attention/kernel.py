"""The kernel: each thread takes units until there are none, then its share of the merges.

A unit is the lanes of a block of rows that read one kv head, in panels of 16, and a piece of the
keys. A tile of keys is copied once for all panels (`tiles.py`), and each of them meets it in the
level-1 cache:

    scores [T, 16] = keys [T, Dq] @ query panel [Dq, 16]         6 keys x 16 lanes in registers
    weights        = 2^(scores factor - peak), vertical          `panels.py`
    out [Dv, 16]  += values^T [Dv, T] @ weights [T, 16]          6 elements x 16 lanes in registers

Keys are the scalar side of both products, so nothing but the query is ever transposed. A panel
meets only keys that one of its lanes sees, and masks only those that some of them do not see.

The state of a panel is `[Dv + 2, 16]`: the sum of weighted values, the peak, in units of log 2, and
the sum of weights.

Legend: `T` keys of a tile, `Dq`, `Dv` key and value width.
Source: "FlashAttention-2" (2023) for the running maximum; Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication" (2008), for the tiles; the merge of partial softmaxes,
docs/exact-merge.md.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from heddle.kernels.compiled import (
    as_real,
    barrier,
    entry,
    given,
    inner,
    num_threads,
    pointer,
    share,
    thread_index,
)
from heddle.kernels.tiled_attention.panels import WIDTH, bend, clear, peak_of, rescale, take, weigh
from heddle.kernels.tiled_attention.plan import MERGE_WORDS, UNIT_WORDS
from heddle.kernels.tiled_attention.tiles import GAP, copy_tile, lanes_of, pack_query
from heddle.kernels.tiled_attention.words import (
    COUNTER,
    HEADS,
    KEY_WIDTH,
    LSE,
    MERGES,
    NUM_LANES,
    NUM_MERGES,
    NUM_UNITS,
    NUM_WORDS,
    OUT,
    PANELS,
    PARTIAL_LSE,
    PARTIAL_OUT,
    ROOM,
    ROOM_FLOATS,
    SCALE,
    SOFTCAP,
    TILE,
    UNITS,
    VALUE_IN_KEY,
    VALUE_WIDTH,
)
from heddle.kernels.vectors import tile_product

HEIGHT = 6
"""Keys, or elements of values, of a register tile."""
_LN_2 = math.log(2.0)
_LOG2_E = np.float32(1 / _LN_2)
_LOWEST = np.float32(np.finfo(np.float32).min)

_score6 = tile_product(HEIGHT, 2, adds=False)
_product6 = tile_product(HEIGHT, 2)
_product4 = tile_product(4, 2)
_product2 = tile_product(2, 2)


def room_floats(key_width: int, value_width: int, tile: int, panels: int, is_within: bool) -> int:
    """Scratch memory of a thread, as `_run_unit` lays it out."""
    row = key_width + GAP + (0 if is_within else value_width + GAP)
    state = key_width + value_width + 2
    return (tile + HEIGHT) * (row + WIDTH) + 2 * WIDTH + panels * WIDTH * state


@inner
def _mask(scores, start, begin, stop, first, end):
    """-inf for keys [begin, stop) outside the range of a lane."""
    rows = numba.carray(pointer(scores), (max(stop - start, 0), WIDTH), np.float32)
    for t in range(begin, stop):
        for j in range(WIDTH):
            if t < first[j] or t >= end[j]:
                rows[t - start, j] = -np.inf


@inner
def _score(w, query, keys, scores, start, stop, first, end):
    """Scores of keys [start, stop) in units that are returned, -inf where a lane sees no key."""
    key_width, count = w[KEY_WIDTH], stop - start
    key_row = key_width + GAP
    for t in range(0, count, HEIGHT):
        key, target = keys + 4 * t * key_row, scores + 4 * t * WIDTH
        _score6(key, key_row, 1, query, WIDTH, target, WIDTH, key_width)
    factor, softcap = np.float32(as_real(w[SCALE])), np.float32(as_real(w[SOFTCAP]))
    if softcap > 0:
        bend(scores, count, factor / softcap, softcap)
        factor = np.float32(1.0)
    every_first, every_end = first.max(), end.min()
    if every_first < every_end:
        _mask(scores, start, start, min(stop, every_first), first, end)
        _mask(scores, start, max(start, every_end), stop, first, end)
    else:
        _mask(scores, start, start, stop, first, end)
    return factor * _LOG2_E


@inner
def _raise_peak(scores, count, factor, state, value_width, kept):
    """The peak over more keys, and what was summed so far relative to it."""
    at = state + 4 * value_width * WIDTH
    peak = numba.carray(pointer(at), (WIDTH,), np.float32)
    before = numba.carray(pointer(kept), (WIDTH,), np.float32)
    top = numba.carray(pointer(kept + 4 * WIDTH), (WIDTH,), np.float32)
    top[:] = -np.inf
    peak_of(scores, count, kept + 4 * WIDTH)
    is_raised = False
    for j in range(WIDTH):
        before[j] = peak[j]
        if top[j] * factor > peak[j]:
            peak[j] = top[j] * factor
            is_raised = True
    if is_raised:
        top[:] = 0
        weigh(kept, 1, np.float32(1.0), at, kept + 4 * WIDTH)  # before -> 2^(before - peak)
        rescale(state, value_width, kept)
        rescale(at + 4 * WIDTH, 1, kept)


@inner
def _add_values(values, value_row, scores, state, width, count):
    """The sum of weighted values over more keys."""
    d = 0
    while d + HEIGHT <= width:
        at = state + 4 * d * WIDTH
        _product6(values + 4 * d, 1, value_row, scores, WIDTH, at, WIDTH, count)
        d += HEIGHT
    if d + 4 <= width:
        at = state + 4 * d * WIDTH
        _product4(values + 4 * d, 1, value_row, scores, WIDTH, at, WIDTH, count)
        d += 4
    if d + 2 <= width:
        at = state + 4 * d * WIDTH
        _product2(values + 4 * d, 1, value_row, scores, WIDTH, at, WIDTH, count)


@inner
def _finish(w, unit, total, states):
    """Normalise the lanes of a unit and put them where they belong, one below the other."""
    lanes, width = lanes_of(w, unit[2]), w[VALUE_WIDTH]
    for place in range(total):
        at = states + 4 * (place // WIDTH * WIDTH * (width + 2) + place % WIDTH)
        state = numba.carray(pointer(at), ((width + 2) * WIDTH,), np.float32)
        outs, lses = w[OUT], w[LSE]
        target = (unit[0] + place // len(lanes)) * w[NUM_LANES] + lanes[place % len(lanes)]
        if unit[5] >= 0:
            outs, lses, target = w[PARTIAL_OUT], w[PARTIAL_LSE], unit[5] + place
        out = numba.carray(pointer(outs + 4 * target * width), (width,), np.float32)
        lse = numba.carray(pointer(lses + 4 * target), (1,), np.float32)
        mass = state[(width + 1) * WIDTH]
        if mass == 0:
            out[:] = 0
            lse[0] = -np.inf
            continue
        part = np.float32(1) / mass
        for d in range(width):
            out[d] = state[d * WIDTH] * part
        lse[0] = np.float32((np.float64(state[width * WIDTH]) + np.log2(np.float64(mass))) * _LN_2)


@inner
def _clear_states(states, num_panels, width):
    """Of lanes that have met nothing. Their peak is finite: -inf - -inf would be NaN."""
    clear(states, num_panels * WIDTH * (width + 2))
    for p in range(num_panels):
        at = states + 4 * (p * (width + 2) + width) * WIDTH
        numba.carray(pointer(at), (WIDTH,), np.float32)[:] = _LOWEST


@inner
def _range_of(first, end, start, stop):
    """Keys among [start, stop) that hold all that some lane of a panel sees."""
    least, most = stop, start
    for j in range(WIDTH):
        if first[j] < end[j]:
            least, most = min(least, first[j]), max(most, end[j])
    return max(least, start), min(most, stop)


@inner
def _run_unit(w, unit, room, bounds, seen):
    """Attention of a unit, with scratch memory at `room`."""
    key_width, value_width, tile = w[KEY_WIDTH], w[VALUE_WIDTH], w[TILE]
    key_row, value_row = key_width + GAP, value_width + GAP
    keys = room
    values = scores = keys + 4 * (tile + HEIGHT) * key_row
    if w[VALUE_IN_KEY] >= 0:
        values, value_row = keys + 4 * w[VALUE_IN_KEY], key_row
    else:
        scores = values + 4 * tile * value_row
    kept = scores + 4 * (tile + HEIGHT) * WIDTH
    panels = kept + 4 * 2 * WIDTH
    states = panels + 4 * w[PANELS] * WIDTH * key_width
    total = pack_query(w, unit, panels, bounds)
    num_panels = (total + WIDTH - 1) // WIDTH
    _clear_states(states, num_panels, value_width)
    head = numba.carray(pointer(w[HEADS]), (unit[2] + 1,), np.int64)[unit[2]]
    for start in range(unit[3], unit[4], tile):
        stop = min(start + tile, unit[4])
        copy_tile(w, unit, head, start, stop - start, keys, values, seen)
        for p in range(num_panels):
            first = bounds[0, p * WIDTH : (p + 1) * WIDTH]
            end = bounds[1, p * WIDTH : (p + 1) * WIDTH]
            begin, until = _range_of(first, end, start, stop)
            if begin >= until:
                continue
            query = panels + 4 * p * WIDTH * key_width
            state = states + 4 * p * WIDTH * (value_width + 2)
            key, value = (
                keys + 4 * (begin - start) * key_row,
                values + 4 * (begin - start) * value_row,
            )
            factor = _score(w, query, key, scores, begin, until, first, end)
            peak = state + 4 * value_width * WIDTH
            _raise_peak(scores, until - begin, factor, state, value_width, kept)
            weigh(scores, until - begin, factor, peak, peak + 4 * WIDTH)
            _add_values(value, value_row, scores, state, value_width, until - begin)
    _finish(w, unit, total, states)


@inner
def _merge(w, thread, threads):
    """A thread's share of the lanes whose keys were cut in pieces."""
    merges = numba.carray(pointer(w[MERGES]), (w[NUM_MERGES], MERGE_WORDS), np.int64)
    for m in range(w[NUM_MERGES]):
        start, end, group, first, pieces = merges[m]
        lanes = lanes_of(w, group)
        step = (end - start) * len(lanes)
        begin, stop = share(step, thread, threads)
        for place in range(begin, stop):
            target = (start + place // len(lanes)) * w[NUM_LANES] + lanes[place % len(lanes)]
            _merge_lane(w, first + place, step, pieces, target)


@inner
def _merge_lane(w, source, step, pieces, target):
    """Partial states source, source + step, ... as one, in ascending order."""
    width = w[VALUE_WIDTH]
    outs = numba.carray(pointer(w[PARTIAL_OUT]), (source + step * pieces, width), np.float32)
    lses = numba.carray(pointer(w[PARTIAL_LSE]), (source + step * pieces,), np.float32)
    out = numba.carray(pointer(w[OUT] + 4 * target * width), (width,), np.float32)
    lse = numba.carray(pointer(w[LSE] + 4 * target), (1,), np.float32)
    top = np.float32(-np.inf)
    for piece in range(pieces):
        if not lses[source + step * piece] <= top:  # NaN passes, and stays in the total
            top = lses[source + step * piece]
    out[:] = 0
    lse[0] = top
    if top == -np.inf:
        return
    total = np.float64(0)
    for piece in range(pieces):
        total += np.exp(np.float64(lses[source + step * piece]) - np.float64(top))
    for piece in range(pieces):
        weight = np.exp(np.float64(lses[source + step * piece]) - np.float64(top)) / total
        part, share_of = outs[source + step * piece], np.float32(weight)
        for d in range(width):
            out[d] += share_of * part[d]
    lse[0] = np.float32(np.float64(top) + np.log(total))


@entry
def attention(address):
    """Everything."""
    w = given(address, NUM_WORDS)
    thread, threads = thread_index(), num_threads()
    units = numba.carray(pointer(w[UNITS]), (w[NUM_UNITS], UNIT_WORDS), np.int64)
    bounds = np.empty((2, w[PANELS] * WIDTH), np.int64)
    seen = np.empty(w[TILE], np.int8)
    room = w[ROOM] + 4 * thread * w[ROOM_FLOATS]
    unit = take(w[COUNTER])
    while unit < w[NUM_UNITS]:
        _run_unit(w, units[unit], room, bounds, seen)
        unit = take(w[COUNTER])
    if w[NUM_MERGES] > 0:
        barrier()
        _merge(w, thread, threads)
