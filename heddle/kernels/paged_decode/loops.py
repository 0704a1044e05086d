"""The two products of a tile of stored keys, row by row where they lie, for up to 4 lanes at once.

    score_keys    scores[m][t] = sum_i query[m][i] row_t[i]
    add_values    out[m][i]    = out[m][i] kept[m] + sum_t weights[m][t] row_t[i]

Rows are given as a list of addresses. Elements are widened in registers as they are loaded:
bfloat16 is the upper half of a float32; float16 the processor converts; codes become whole numbers
(int8), or float16 with the same exponent field, which is too small by `E4M3_SCALE`. The scales of
codes are left to the caller.

Between its multiplications a loop asks for the memory of the next tile, in the order in which it
lies and a few lines at a time. Asked for faster, or by heads, requests are dropped by the processor
and memory answers at half its rate.

    cursor   | place | end | next run |   then runs, each | first | end | next run |

Legend: `m` lane, `t` key, `i` element.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from heddle.kernels.vectors import (
    _VECTOR,
    _WORD,
    LANES,
    _fused,
    _load,
    _pointer,
    _scalar,
    _shuffled,
    _spread,
    _store,
    _zeros,
)

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1}
"""Bytes of an element."""
E4M3_SCALE = 256.0
MAX_LANES = 4
VECTORS_AT_ONCE = {1: 8, 2: 4, 3: 4, 4: 2}
"""Vectors of a value that sums are kept in registers for, by the number of lanes."""
_LINE = 64
_CURSOR_WORDS = 3


def _integers(bits: int) -> Any:
    return ir.VectorType(ir.IntType(bits), LANES)


def _whole(value: int, bits: int) -> Any:
    return ir.Constant(_integers(bits), [value] * LANES)


def _elements(builder: Any, form: str, row: Any, index: Any) -> Any:
    """8 elements of a stored row as float32, codes without their scale."""
    size = SIZES[form]
    place = builder.add(row, builder.mul(index, _WORD(size)))
    if form == "float32":
        return builder.load(builder.inttoptr(place, _VECTOR.as_pointer()), align=size)
    stored = builder.load(builder.inttoptr(place, _integers(8 * size).as_pointer()), align=size)
    if form == "bfloat16":
        wide = builder.shl(builder.zext(stored, _integers(32)), _whole(16, 32))
        return builder.bitcast(wide, _VECTOR)
    if form == "int8":
        return builder.sitofp(builder.sext(stored, _integers(32)), _VECTOR)
    if form == "fp8_e4m3":  # s eeee mmm -> s 0eeee mmm0000000
        shifted = builder.shl(builder.sext(stored, _integers(16)), _whole(7, 16))
        stored = builder.and_(shifted, _whole(0xBFFF, 16))
    return builder.fpext(builder.bitcast(stored, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)


@contextmanager
def _steps(builder: Any, start: Any, stop: Any, step: int) -> Iterator[Any]:
    with cgutils.for_range_slice(builder, start, stop, _WORD(step), inc=True) as (i, _):
        yield i


def _words_at(builder: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, _WORD.as_pointer()), [index])


def _word(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_words_at(builder, address, index))


def _slots(builder: Any, count: int) -> list[Any]:
    """Registers, cleared here and not only where the function begins."""
    slots = [cgutils.alloca_once(builder, _VECTOR) for _ in range(count)]
    for slot in slots:
        builder.store(_zeros(), slot)
    return slots


def _sums_of_four(builder: Any, vectors: list[Any]) -> Any:
    """The sums of four vectors, as a vector of 4: halves first, which are cheap to take apart."""
    halves = [
        builder.fadd(*[_shuffled(builder, v, v, list(range(n, n + 4))) for n in (0, 4)])
        for v in vectors
    ]
    low, high = (
        builder.fadd(_shuffled(builder, a, b, [0, 4, 1, 5]), _shuffled(builder, a, b, [2, 6, 3, 7]))
        for a, b in (halves[:2], halves[2:])
    )  # a0+a2 b0+b2 a1+a3 b1+b3
    return builder.fadd(
        _shuffled(builder, low, high, [0, 1, 4, 5]), _shuffled(builder, low, high, [2, 3, 6, 7])
    )


class _Reader:
    """The cursor, in registers while a loop runs."""

    def __init__(self, builder: Any, cursor: Any, pace: Any) -> None:
        self.builder, self.cursor, self.pace = builder, cursor, pace
        self.slots = [
            cgutils.alloca_once_value(builder, _word(builder, cursor, _WORD(i)))
            for i in range(_CURSOR_WORDS)
        ]

    def ask(self, lines: int) -> None:
        """Ask for some lines, and move on by `pace` bytes, or to the next run."""
        builder, (place, end, following) = self.builder, self.slots
        first = builder.load(place)
        for line in range(lines):
            self._ask_line(builder.add(first, _WORD(_LINE * line)))
        moved = builder.add(first, self.pace)
        builder.store(moved, place)
        is_over = builder.icmp_signed(">=", moved, builder.load(end))
        with builder.if_then(is_over, likely=False):
            run = builder.load(following)
            for i, slot in enumerate(self.slots):
                builder.store(_word(builder, run, _WORD(i)), slot)

    def _ask_line(self, address: Any) -> None:
        builder, byte, number = self.builder, ir.IntType(8).as_pointer(), ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
        place = builder.inttoptr(address, byte)
        builder.call(prefetch, [place, number(0), number(2), number(1)])

    def leave(self) -> None:
        """Write the cursor back."""
        for i, slot in enumerate(self.slots):
            value = self.builder.load(slot)
            self.builder.store(value, _words_at(self.builder, self.cursor, _WORD(i)))


def keys_at_once(lanes: int) -> int:
    """Keys whose sums stay in registers, for some lanes."""
    return 4 if lanes < MAX_LANES else 2


def score_keys(form: str, lanes: int) -> Any:
    """An intrinsic `(query, query_row, rows, cursor, pace, shift, scores, score_row, count,
    width)`.

    Row t begins `shift` bytes behind `rows[t]`; rows of query and scores are `query_row` and
    `score_row` bytes apart. Keys are met four at a time, so up to 3 more than `count` must be
    readable. `width` is a multiple of 8.
    """
    columns = keys_at_once(lanes)
    lines = max(1, columns * LANES * SIZES[form] // _LINE)

    def products(builder: Any, query_at: list[Any], keys: list[Any], sums: Any, i: Any) -> None:
        shared = [_load(builder, at, i) for at in query_at]
        for j, key in enumerate(keys):
            stored = _elements(builder, form, key, i)
            for query, totals in zip(shared, sums, strict=True):
                product = _fused(builder, query, stored, builder.load(totals[j]))
                builder.store(product, totals[j])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        query, query_row, rows, cursor, pace, shift, scores, score_row, count, width = arguments
        query_at = [builder.add(query, builder.mul(query_row, _WORD(m))) for m in range(lanes)]
        even = builder.and_(width, _WORD(-2 * LANES))
        reader = _Reader(builder, cursor, pace)
        with _steps(builder, _WORD(0), count, 4) as t:
            found: list[list[Any]] = [[] for _ in range(lanes)]
            for first in range(0, 4, columns):
                places = [builder.add(t, _WORD(first + j)) for j in range(columns)]
                keys = [builder.add(_word(builder, rows, place), shift) for place in places]
                sums = [_slots(builder, columns) for _ in range(lanes)]
                with _steps(builder, _WORD(0), even, 2 * LANES) as i:
                    reader.ask(2 * lines)
                    products(builder, query_at, keys, sums, i)
                    products(builder, query_at, keys, sums, builder.add(i, _WORD(LANES)))
                with builder.if_then(builder.icmp_signed("<", even, width), likely=False):
                    products(builder, query_at, keys, sums, even)
                for m in range(lanes):
                    found[m] += [builder.load(total) for total in sums[m]]
            for m in range(lanes):
                row = builder.add(scores, builder.mul(score_row, _WORD(m)))
                at = builder.add(row, builder.mul(t, _WORD(4)))
                four = _sums_of_four(builder, found[m])
                builder.store(four, _pointer(builder, at, 4), align=4)
        reader.leave()
        return context.get_dummy_value()

    return _of_words(generate, 10)


def add_values(form: str, lanes: int) -> Any:
    """An intrinsic `(out, out_row, kept, rows, cursor, pace, shift, weights, weight_row, count,
    width)`.

    Row t begins `shift` bytes behind `rows[t]`; rows of out and weights are `out_row` and
    `weight_row` bytes apart. `width` is a multiple of 8.
    """
    size, wide = SIZES[form], VECTORS_AT_ONCE[lanes]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        out, out_row, kept, rows, cursor, pace, shift, weights, weight_row, count, width = arguments
        out_at = [builder.add(out, builder.mul(out_row, _WORD(m))) for m in range(lanes)]
        weight_at = [builder.add(weights, builder.mul(weight_row, _WORD(m))) for m in range(lanes)]
        reader = _Reader(builder, cursor, pace)

        def columns(start: Any, vectors: int) -> None:
            sums = [_slots(builder, vectors) for _ in range(lanes)]
            offset = builder.add(shift, builder.mul(start, _WORD(size)))
            with _steps(builder, _WORD(0), count, 1) as t:
                row = builder.add(_word(builder, rows, t), offset)
                reader.ask(-(-vectors * LANES * size // _LINE))
                factors = [_spread(builder, _scalar(builder, at, t)) for at in weight_at]
                for n in range(vectors):
                    value = _elements(builder, form, row, _WORD(n * LANES))
                    for factor, totals in zip(factors, sums, strict=True):
                        product = _fused(builder, factor, value, builder.load(totals[n]))
                        builder.store(product, totals[n])
            for m in range(lanes):
                keep = _spread(builder, _scalar(builder, kept, _WORD(m)))
                for n in range(vectors):
                    i = builder.add(start, _WORD(n * LANES))
                    before = _load(builder, out_at[m], i)
                    after = _fused(builder, before, keep, builder.load(sums[m][n]))
                    _store(builder, after, out_at[m], i)

        most = builder.sub(width, builder.urem(width, _WORD(wide * LANES)))
        with _steps(builder, _WORD(0), most, wide * LANES) as start:
            columns(start, wide)
        with _steps(builder, most, width, LANES) as start:
            columns(start, 1)
        reader.leave()
        return context.get_dummy_value()

    return _of_words(generate, 11)


def _of_words(generate: Any, count: int) -> Any:
    """An intrinsic of 10 or 11 words, whose parameters numba wants to see by name."""
    form = types.void(*[types.int64] * count)

    def ten(typing, a, b, c, d, e, f, g, h, i, j):  # noqa: ARG001
        return form, generate

    def eleven(typing, a, b, c, d, e, f, g, h, i, j, k):  # noqa: ARG001
        return form, generate

    return intrinsic(ten if count == 10 else eleven)
