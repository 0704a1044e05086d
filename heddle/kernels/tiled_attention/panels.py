"""Panels: 16 query lanes side by side, two vectors wide, and the passes of a softmax over them.

A panel is `[n, 16]` floats without gaps. Scores stand in it with the keys below each other, so the
maximum and the sum over keys are vertical: nothing is ever reduced across a vector.

    peak_of(s, n, peak)                     peak[j] = max(peak[j], max_t s[t, j]); NaN passed over
    weigh(s, n, factor, peak, total)        s[t, j] = 2^(s[t, j] factor - peak[j]), exactly 0 where
                                            that is below 2^-127; total[j] += sum_t s[t, j]
    rescale(s, n, kept)                     s[t, j] *= kept[j]
    bend(s, n, factor, cap)                 s[t, j] = cap tanh(s[t, j] factor)
    clear(s, n)                             n floats become 0
    copy(target, source, n)                 n floats, in multiples of 8

All operands are addresses of float32, any alignment of 4 bytes.

2^x of a float32: with n = round(x), 2^x = 2^n 2^r with |r| <= 1/2, a polynomial for 2^r, and n as
bits of the exponent: they are the lowest of a sum with a number so large that nothing is left below
the units. NaN stays NaN. tanh follows from it far from 0, and near 0 from its own series, where a
difference of exponentials would lose digits.

Source: the polynomial meets 2^r in the Chebyshev points of [-1/2, 1/2], where its error is below
2^-28 at order 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from heddle.kernels.vectors import _VECTOR, _WORD, LANES, _fused, _load, _slots, _spread, _store

WIDTH = 2 * LANES
"""Lanes of a panel."""
_VECTORS = range(WIDTH // LANES)
_EXP2 = (
    np.polynomial.Chebyshev.interpolate(np.exp2, deg=6, domain=[-0.5, 0.5])
    .convert(kind=np.polynomial.Polynomial)
    .coef.tolist()
)
"""2^r = _EXP2[0] + _EXP2[1] r + ..."""
_BITS = ir.VectorType(ir.IntType(32), LANES)
_LOWEST = -127.0
_ROUNDER = 1.5 * 2**23 + 127
"""Its sum with a whole number n has the lowest bits n + 127."""

_TANH = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)
"""tanh x = x + x x^2 (_TANH[0] + _TANH[1] x^2 + ...)."""


def _constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _columns(builder: Any, address: Any) -> list[Any]:
    """The two vectors at an address."""
    return [_load(builder, address, _WORD(LANES * n)) for n in _VECTORS]


@contextmanager
def _each_vector(builder: Any, count: Any) -> Iterator[list[Any]]:
    """A loop over the rows of a panel: places of their vectors, in floats."""
    with cgutils.for_range(builder, count, intp=_WORD) as loop:
        row = builder.mul(loop.index, _WORD(WIDTH))
        yield [builder.add(row, _WORD(LANES * n)) for n in _VECTORS]


def _exp2(builder: Any, x: Any) -> Any:
    # The comparison is false of NaN, which so goes on.
    x = builder.select(builder.fcmp_ordered("<", x, _constant(_LOWEST)), _constant(_LOWEST), x)
    # Not by adding and taking away: the compiler may reorder sums.
    whole = _call(builder, "rint", x)
    rest = builder.fsub(x, whole)
    bits = builder.bitcast(builder.fadd(whole, _constant(_ROUNDER)), _BITS)
    exponent = builder.shl(bits, ir.Constant(_BITS, [23] * LANES))
    value = _constant(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        value = _fused(builder, value, rest, _constant(coefficient))
    return builder.fmul(value, builder.bitcast(exponent, _VECTOR))


def _tanh(builder: Any, x: Any) -> Any:
    one, size = _constant(1.0), _call(builder, "fabs", x)
    shrunk = _exp2(builder, builder.fmul(size, _constant(-2 / math.log(2))))
    far = builder.fdiv(builder.fsub(one, shrunk), builder.fadd(one, shrunk))
    square = builder.fmul(x, x)
    series = _constant(_TANH[-1])
    for coefficient in reversed(_TANH[:-1]):
        series = _fused(builder, series, square, _constant(coefficient))
    near = _fused(builder, builder.fmul(size, square), series, size)
    is_near = builder.fcmp_ordered("<", size, _constant(0.3))
    return _call(builder, "copysign", builder.select(is_near, near, far), x)


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    """An intrinsic of LLVM on vectors."""
    form = ir.FunctionType(_VECTOR, [_VECTOR] * len(arguments))
    function = cgutils.get_or_insert_function(builder.module, form, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, arguments)


@intrinsic  # type: ignore[untyped-decorator]
def peak_of(typing: Any, s: Any, count: Any, peak: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        s, count, peak = arguments
        tops = [_slots(builder, 1, top)[0] for top in _columns(builder, peak)]
        with _each_vector(builder, count) as places:
            for place, top in zip(places, tops, strict=True):
                x, best = _load(builder, s, place), builder.load(top)
                larger = builder.fcmp_ordered(">", x, best)
                builder.store(builder.select(larger, x, best), top)
        for n, top in enumerate(tops):
            _store(builder, builder.load(top), peak, _WORD(LANES * n))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def weigh(typing: Any, s: Any, count: Any, factor: Any, peak: Any, total: Any) -> Any:  # noqa: ARG001
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        s, count, factor, peak, total = arguments
        scale = _spread(builder, factor)
        lowered = [builder.fneg(top) for top in _columns(builder, peak)]
        sums = _slots(builder, len(_VECTORS), _constant(0.0))
        with _each_vector(builder, count) as places:
            for place, low, mass in zip(places, lowered, sums, strict=True):
                x = _fused(builder, _load(builder, s, place), scale, low)
                weight = _exp2(builder, x)
                _store(builder, weight, s, place)
                builder.store(builder.fadd(weight, builder.load(mass)), mass)
        for n, (before, mass) in enumerate(zip(_columns(builder, total), sums, strict=True)):
            _store(builder, builder.fadd(before, builder.load(mass)), total, _WORD(LANES * n))
        return context.get_dummy_value()

    words = [types.int64, types.int64, types.float32, types.int64, types.int64]
    return types.void(*words), generate


@intrinsic  # type: ignore[untyped-decorator]
def rescale(typing: Any, s: Any, count: Any, kept: Any) -> Any:  # noqa: ARG001
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        s, count, kept = arguments
        factors = _columns(builder, kept)
        with _each_vector(builder, count) as places:
            for place, factor in zip(places, factors, strict=True):
                _store(builder, builder.fmul(_load(builder, s, place), factor), s, place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def bend(typing: Any, s: Any, count: Any, factor: Any, cap: Any) -> Any:  # noqa: ARG001
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        s, count, factor, cap = arguments
        scale, limit = _spread(builder, factor), _spread(builder, cap)
        with _each_vector(builder, count) as places:
            for place in places:
                x = builder.fmul(_load(builder, s, place), scale)
                _store(builder, builder.fmul(_tanh(builder, x), limit), s, place)
        return context.get_dummy_value()

    words = [types.int64, types.int64, types.float32, types.float32]
    return types.void(*words), generate


@intrinsic  # type: ignore[untyped-decorator]
def clear(typing: Any, s: Any, count: Any) -> Any:  # noqa: ARG001
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        s, count = arguments
        with cgutils.for_range_slice(builder, _WORD(0), count, _WORD(LANES), inc=True) as (i, _):
            _store(builder, _constant(0.0), s, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy(typing: Any, target: Any, source: Any, count: Any) -> Any:  # noqa: ARG001
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        target, source, count = arguments
        with cgutils.for_range_slice(builder, _WORD(0), count, _WORD(LANES), inc=True) as (i, _):
            _store(builder, _load(builder, source, i), target, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def take(typing: Any, counter: Any) -> Any:  # noqa: ARG001
    """The next number of a counter, a word that all threads count up."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", place, _WORD(1), "monotonic")

    return types.int64(types.int64), generate
