"""Paged attention of few rows on a CPU: every stored byte is read once, in the order of memory.

Decode is bound by memory. A thread takes the next piece of some row's keys that nobody has taken,
and within it a tile at a time, small enough that the values are still in its own cache when the
scores are known:

    scores [Hq, T] of all heads  ->  new peaks  ->  weights  ->  out = out kept + weights @ values

while it asks for the next tile (`loops.py`). When all pieces are done the threads share out the
merges. Which thread takes which piece changes no number.

Weights are powers of 2. A peak begins far below any
score, but finite, so that no difference of infinities arises.

Legend: `R` rows, `Hq` lanes, `Ks` kv heads, `Dq`, `Dv` key and value width, `P` pieces, `T` keys of
a tile, `w` the words of `words.py`.
Source: the merge of partial softmaxes, `docs/exact-merge.md`; pieces, "Flash-Decoding for
long-context inference" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

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
from heddle.kernels.paged_decode.loops import E4M3_SCALE, SIZES, add_values, score_keys
from heddle.kernels.paged_decode.plan import MAX_PIECE
from heddle.kernels.paged_decode.softmax import add_product, exp2_sum, multiply, raise_peaks
from heddle.kernels.paged_decode.words import (
    BLOCK_SIZE,
    COUNTER,
    FACTOR,
    GROUPS,
    HEAD_BYTES,
    HEADS,
    KEY_WIDTH,
    LSE,
    NUM_GROUPS,
    NUM_LANES,
    NUM_PIECES,
    NUM_PLAN_WORDS,
    NUM_ROWS,
    NUM_WORDS,
    OUT,
    PARTIAL_LSE,
    PARTIAL_OUT,
    PARTS,
    PIECES,
    PIECES_UNTIL,
    PLAN,
    QUERY,
    QUERY_ROW,
    ROOM,
    ROOM_BYTES,
    ROW_BYTES,
    ROWS,
    SCORE_PACE,
    SOFTCAP,
    TABLE_BLOCKS,
    TABLE_OF_ROW,
    TABLES,
    TILE,
    VALUE_PACE,
    VALUE_START,
    VALUE_WIDTH,
)
from heddle.kernels.tiled_attention.panels import take
from heddle.kernels.vectors import LANES, largest, scale

MAX_TILE = 64
"""Keys of a tile at most."""
_SCORE_ROW = 4 * MAX_TILE
_AHEAD = MAX_TILE + 8
"""Addresses that are known behind those of a piece."""
_CURSOR_WORDS = 6 + 3 * MAX_TILE
_LOWEST = np.float32(-3e38)
_LN_2 = np.float32(math.log(2.0))
_LOG2_E = np.float32(1 / math.log(2.0))


@inner
def _place(w, p, most, target):
    """Addresses of the first rows of a piece, at most `most`; how many there are."""
    piece = numba.carray(pointer(w[PIECES] + 24 * p), (3,), np.int64)
    row, first, count = piece[0], piece[1], min(most, piece[2] - piece[1])
    table_of_row = numba.carray(pointer(w[TABLE_OF_ROW]), (row + 1,), np.int64)
    start = w[TABLES] + 8 * w[TABLE_BLOCKS] * table_of_row[row]
    table = numba.carray(pointer(start), (w[TABLE_BLOCKS],), np.int64)
    size, row_bytes = w[BLOCK_SIZE], w[ROW_BYTES]
    places = numba.carray(pointer(target), (count,), np.int64)
    block, offset, t = first // size, first % size, 0
    while t < count:
        at = w[ROWS] + (table[block] * size + offset) * row_bytes
        stop = min(count, t + size - offset)
        while t < stop:
            places[t] = at
            at += row_bytes
            t += 1
        block, offset = block + 1, 0
    return count


@inner
def _aim(rows, count, row_bytes, cursor):
    """Point the cursor at the runs of bytes that some rows make; behind the last it stays."""
    at = numba.carray(pointer(rows), (count,), np.int64)
    words = numba.carray(pointer(cursor), (_CURSOR_WORDS,), np.int64)
    run, t = 3, 0
    while t < count:
        first, end, t = at[t], at[t] + row_bytes, t + 1
        while t < count and at[t] == end:
            end, t = end + row_bytes, t + 1
        words[run], words[run + 1], words[run + 2] = first, end, cursor + 8 * (run + 3)
        run += 3
    words[run], words[run + 1], words[run + 2] = cursor, cursor, cursor + 8 * run
    words[0], words[1], words[2] = words[3], words[4], words[5]


@inner
def _words(address):
    """The words of a launch, and before them those of its plan, see `words.py`."""
    words = np.empty(NUM_WORDS, np.int64)
    words[NUM_PLAN_WORDS:] = given(address, NUM_WORDS - NUM_PLAN_WORDS)
    words[:NUM_PLAN_WORDS] = numba.carray(pointer(words[PLAN]), (NUM_PLAN_WORDS,), np.int64)
    return words


@inner
def _cap(scores, count, softcap):
    values = numba.carray(pointer(scores), (count,), np.float32)
    for t in range(count):
        values[t] = math.tanh(values[t] / softcap) * softcap * _LOG2_E


@inner
def _fill(start, first, end, value):
    values = numba.carray(pointer(start), (end,), np.float32)
    for t in range(first, end):
        values[t] = value


@inner
def _weigh(w, scores, count, softcap, state):
    """Scores of all lanes become weights."""
    peaks, tops, kept, totals = state
    padded = (count + LANES - 1) // LANES * LANES
    factor = np.float32(as_real(w[FACTOR]))
    for i in range(w[NUM_LANES]):
        row = scores + _SCORE_ROW * i
        scale(row, factor, padded)
        if softcap > 0:
            _cap(row, count, softcap)
        _fill(row, count, padded, np.float32(-np.inf))
        tops[i] = largest(row, padded)
    raise_peaks(peaks.ctypes.data, tops.ctypes.data, kept.ctypes.data, len(peaks))
    for i in range(w[NUM_LANES]):
        mass = exp2_sum(scores + _SCORE_ROW * i, peaks[i], padded)
        totals[i] = totals[i] * kept[i] + mass


def _dispatch(create: Callable[[str, int], Any], form: str) -> tuple[Any, Any, Any, Any]:
    """One loop for each number of lanes."""
    one, two, three, four = (create(form, lanes) for lanes in range(1, 5))
    return one, two, three, four


def _products(form: str) -> tuple[Any, Any]:
    """Both products of a group of lanes; the choice among loops that are made for a number."""
    score1, score2, score3, score4 = _dispatch(score_keys, form)
    add1, add2, add3, add4 = _dispatch(add_values, form)

    @inner
    def score(lanes, query, row, rows, cursor, pace, shift, scores, count, width):
        if lanes == 1:
            score1(query, row, rows, cursor, pace, shift, scores, _SCORE_ROW, count, width)
        elif lanes == 2:
            score2(query, row, rows, cursor, pace, shift, scores, _SCORE_ROW, count, width)
        elif lanes == 3:
            score3(query, row, rows, cursor, pace, shift, scores, _SCORE_ROW, count, width)
        else:
            score4(query, row, rows, cursor, pace, shift, scores, _SCORE_ROW, count, width)

    @inner
    def add(lanes, out, kept, rows, cursor, pace, shift, weights, count, width):
        row = 4 * width
        if lanes == 1:
            add1(out, row, kept, rows, cursor, pace, shift, weights, _SCORE_ROW, count, width)
        elif lanes == 2:
            add2(out, row, kept, rows, cursor, pace, shift, weights, _SCORE_ROW, count, width)
        elif lanes == 3:
            add3(out, row, kept, rows, cursor, pace, shift, weights, _SCORE_ROW, count, width)
        else:
            add4(out, row, kept, rows, cursor, pace, shift, weights, _SCORE_ROW, count, width)

    return score, add


@inner
def _load_scales(rows, count, shift, unit, scales):
    """Float32 numbers `shift` bytes behind each row, times `unit`; 0 up to a multiple of 8."""
    at = numba.carray(pointer(rows), (count,), np.int64)
    values = numba.carray(pointer(scales), (MAX_TILE,), np.float32)
    for t in range(count):
        values[t] = numba.carray(pointer(at[t] + shift), (1,), np.float32)[0] * unit
    _fill(scales, count, (count + LANES - 1) // LANES * LANES, np.float32(0))


def _stored_products(form: str) -> tuple[Any, Any]:
    """Both products with stored numbers; of codes, with the scales of their parts.

    Parts of codes: how many make up the key, that of the value, the byte at which scales begin,
    then the element at which each part of the key ends.
    """
    score, add = _products(form)
    size, unit = SIZES[form], np.float32(E4M3_SCALE if form == "fp8_e4m3" else 1.0)

    @inner
    def score_stored(w, head, lane, lanes, rows, cursor, scores, count, query, room):  # noqa: ARG001
        width, pace, shift = w[KEY_WIDTH], w[SCORE_PACE], head * w[HEAD_BYTES]
        at, target = query + 4 * lane * width, scores + _SCORE_ROW * lane
        score(lanes, at, 4 * width, rows, cursor, pace, shift, target, count, width)

    @inner
    def score_codes(w, head, lane, lanes, rows, cursor, scores, count, query, room):
        width, pace, shift = w[KEY_WIDTH], w[SCORE_PACE], head * w[HEAD_BYTES]
        parts = numba.carray(pointer(w[PARTS]), (16,), np.int64)
        scales, padded = room + 4 * _SCORE_ROW, (count + LANES - 1) // LANES * LANES
        first = 0
        for part in range(parts[0]):
            end = parts[3 + part]
            at, target = query + 4 * (lane * width + first), scores + _SCORE_ROW * lane
            found = room if part > 0 else target
            score(
                lanes, at, 4 * width, rows, cursor, pace, shift + first, found, count, end - first
            )
            _load_scales(rows, count, shift + parts[2] + 4 * part, unit, scales)
            for i in range(lanes):
                if part > 0:
                    add_product(target + _SCORE_ROW * i, found + _SCORE_ROW * i, scales, padded)
                else:
                    multiply(target + _SCORE_ROW * i, scales, padded)
            first = end

    @inner
    def add_stored(w, head, lane, lanes, rows, cursor, weights, count, out, kept, room):  # noqa: ARG001
        width, pace, shift = w[VALUE_WIDTH], w[VALUE_PACE], head * w[HEAD_BYTES]
        target, source = out + 4 * lane * width, weights + _SCORE_ROW * lane
        start = shift + size * w[VALUE_START]
        add(lanes, target, kept + 4 * lane, rows, cursor, pace, start, source, count, width)

    @inner
    def add_codes(w, head, lane, lanes, rows, cursor, weights, count, out, kept, room):
        parts = numba.carray(pointer(w[PARTS]), (16,), np.int64)
        shift = head * w[HEAD_BYTES] + parts[2] + 4 * parts[1]
        _load_scales(rows, count, shift, unit, room)
        for i in range(lane, lane + lanes):
            multiply(weights + _SCORE_ROW * i, room, (count + LANES - 1) // LANES * LANES)
        add_stored(w, head, lane, lanes, rows, cursor, weights, count, out, kept, room)

    return (score_codes, add_codes) if size == 1 else (score_stored, add_stored)


_add_row = add_values("float32", 1)


@inner
def _merge(w, row, lane, rows, weights, cursor, one):
    """States of the pieces of a row as one, in ascending order."""
    until = numba.carray(pointer(w[PIECES_UNTIL] + 8 * row), (2,), np.int64)
    first, end, lanes, width = until[0], until[1], w[NUM_LANES], w[VALUE_WIDTH]
    lses = numba.carray(pointer(w[PARTIAL_LSE]), (end, lanes), np.float32)
    out, lse = w[OUT] + 4 * (row * lanes + lane) * width, w[LSE] + 4 * (row * lanes + lane)
    at = numba.carray(pointer(rows), (MAX_TILE,), np.int64)
    weight = numba.carray(pointer(weights), (MAX_TILE,), np.float32)
    top = np.float32(-np.inf)
    for p in range(first, end):
        if not lses[p, lane] <= top:  # NaN passes, and stays in the total
            top = lses[p, lane]
    _fill(out, 0, width, np.float32(0))
    _fill(lse, 0, 1, top)
    if top == -np.inf:
        return
    total = np.float64(0)
    for start in range(first, end, MAX_TILE):
        count = min(MAX_TILE, end - start)
        for t in range(count):
            share_of = np.exp(np.float64(lses[start + t, lane]) - np.float64(top))
            total += share_of
            weight[t] = np.float32(share_of)
            at[t] = w[PARTIAL_OUT] + 4 * ((start + t) * lanes + lane) * width
        _add_row(out, 0, one, rows, cursor, 0, 0, weights, 0, count, width)
    scale(out, np.float32(1 / total), width)
    _fill(lse, 0, 1, np.float32(np.float64(top) + np.log(total)))


def room_bytes(lanes: int) -> int:
    """Scratch memory of a thread: 5 rows of scores for products, those of lanes, the state of
    lanes, the cursor, and addresses of rows.
    """
    padded = (lanes + LANES - 1) // LANES * LANES
    floats = (lanes + 5) * MAX_TILE + 4 * padded
    words = _CURSOR_WORDS + MAX_PIECE + _AHEAD
    return (4 * floats + 8 * words + 63) // 64 * 64


@inner
def _states(address, count):
    """Peaks, tops of a tile, what earlier sums keep, totals; each of all lanes."""
    return (
        numba.carray(pointer(address), (count,), np.float32),
        numba.carray(pointer(address + 4 * count), (count,), np.float32),
        numba.carray(pointer(address + 8 * count), (count,), np.float32),
        numba.carray(pointer(address + 12 * count), (count,), np.float32),
    )


def _runner(form: str) -> Callable[[int], None]:
    """The kernel for rows of one format."""
    score, add = _stored_products(form)

    @inner
    def finish(w, p, out, state):
        """Divide by the total weight; lanes that read no head are nil."""
        peaks, _, _, totals = state
        lanes, width = w[NUM_LANES], w[VALUE_WIDTH]
        lse = numba.carray(pointer(w[PARTIAL_LSE] + 4 * p * lanes), (lanes,), np.float32)
        heads = numba.carray(pointer(w[HEADS]), (lanes,), np.int32)
        for i in range(lanes):
            lse[i] = -np.inf
            if heads[i] >= 0:
                lse[i] = (peaks[i] + math.log2(totals[i])) * _LN_2
                scale(out + 4 * i * width, np.float32(1) / totals[i], width)

    @inner
    def piece(w, p, n, rows, scores, softcap, state, cursor, room):
        """The state of one row over the keys of a piece."""
        peaks, tops, kept, totals = state
        peaks[:], tops[:], totals[:] = _LOWEST, _LOWEST, 0
        lanes = w[NUM_LANES]
        row = numba.carray(pointer(w[PIECES] + 24 * p), (3,), np.int64)[0]
        query = w[QUERY] + row * w[QUERY_ROW]
        out = w[PARTIAL_OUT] + 4 * p * lanes * w[VALUE_WIDTH]
        _fill(out, 0, lanes * w[VALUE_WIDTH], np.float32(0))
        groups = numba.carray(pointer(w[GROUPS]), (w[NUM_GROUPS], 3), np.int64)
        for start in range(0, n, w[TILE]):
            count, here = min(w[TILE], n - start), rows + 8 * start
            _aim(here + 8 * count, w[TILE], w[ROW_BYTES], cursor)
            for g in range(len(groups)):
                head, lane, many = groups[g]
                score(w, head, lane, many, here, cursor, scores, count, query, room)
            _weigh(w, scores, count, softcap, state)
            for g in range(len(groups)):
                head, lane, many = groups[g]
                add(w, head, lane, many, here, cursor, scores, count, out, kept.ctypes.data, room)
        finish(w, p, out, state)

    @inner
    def run(address):
        """One thread: pieces, then its share of the rows."""
        w = _words(address)
        lanes, num_pieces = w[NUM_LANES], w[NUM_PIECES]
        softcap = np.float32(as_real(w[SOFTCAP]))
        room = w[ROOM] + w[ROOM_BYTES] * thread_index()
        scores = room + 5 * _SCORE_ROW
        states = scores + lanes * _SCORE_ROW
        padded = (lanes + LANES - 1) // LANES * LANES
        state = _states(states, padded)
        cursor = states + 16 * padded
        words = numba.carray(pointer(cursor), (3,), np.int64)
        words[0], words[1], words[2] = cursor, cursor + 8, cursor
        rows = cursor + 8 * _CURSOR_WORDS
        places = numba.carray(pointer(rows), (MAX_PIECE + _AHEAD,), np.int64)
        p = take(w[COUNTER])
        while p < num_pieces:
            n, coming = _place(w, p, MAX_PIECE, rows), take(w[COUNTER])
            known = n
            if coming < num_pieces:
                known += _place(w, coming, _AHEAD, rows + 8 * n)
            for t in range(known, n + _AHEAD):
                places[t] = places[n - 1]
            piece(w, p, n, rows, scores, softcap, state, cursor, room)
            p = coming
        barrier()
        if thread_index() == 0:
            numba.carray(pointer(w[COUNTER]), (1,), np.int64)[0] = 0
        _fill(room, 0, 1, np.float32(1))
        start, stop = share(w[NUM_ROWS] * lanes, thread_index(), num_threads())
        for i in range(start, stop):
            _merge(w, i // lanes, i % lanes, rows, room + _SCORE_ROW, cursor, room)

    return run


_run_float32 = _runner("float32")
_run_bfloat16 = _runner("bfloat16")
_run_float16 = _runner("float16")
_run_int8 = _runner("int8")
_run_fp8 = _runner("fp8_e4m3")


def _float32(address):
    _run_float32(address)


def _bfloat16(address):
    _run_bfloat16(address)


def _float16(address):
    _run_float16(address)


def _int8(address):
    _run_int8(address)


def _fp8(address):
    _run_fp8(address)


ENTRIES = {
    "float32": _float32,
    "bfloat16": _bfloat16,
    "float16": _float16,
    "int8": _int8,
    "fp8_e4m3": _fp8,
}
"""By the type of stored elements."""


@cache
def entry_of(form: str) -> int:
    """Address of the kernel for a type of stored elements; compiled when first asked for."""
    return entry(ENTRIES[form])
