"""The innermost loops, written as vector instructions: products of rows in memory.

Numba leaves vectors to the compiler, which must first prove that arrays do not overlap and lie
close; for rows of 64 elements those checks cost more than the work. So these few loops are emitted
as vectors of 8 floats, which any processor's code generator knows how to cut or join.

All operands are addresses of float32, any alignment of 4 bytes; counts are multiples of `LANES`.

    largest(a, n)                          max_i a[i]; NaN may be passed over
    scale(a, factor, n)                    a[i] *= factor
    silu_mul(gate, up, out, n)             out[i] = gate[i] / (1 + exp(-gate[i])) up[i]
    multiply_tile(...)                     C[m, n] += sum_k A[m, k] B[k, n], one register tile

Source: register tiles, Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
EXP_FLOOR = -87.0
"""Below it, e^x counts as 0."""
LOG2_E = 1.4426950408889634
LN_2_HIGH = 0.693359375
LN_2_LOW = -2.12194440e-4
EXP_SERIES = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""Of (e^r - 1 - r) / r^2, highest power first. Source: Cephes, `expf`."""
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORD = ir.IntType(64)


def _vector_at(builder: Any, address: Any, index: Any) -> Any:
    """Pointer to the vector whose first element is `index` floats behind an address."""
    floats = builder.inttoptr(address, _FLOAT.as_pointer())
    return builder.bitcast(builder.gep(floats, [index]), _VECTOR.as_pointer())


def _load(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_vector_at(builder, address, index), align=4)


def _store(builder: Any, value: Any, address: Any, index: Any) -> None:
    builder.store(value, _vector_at(builder, address, index), align=4)


def _scalar(builder: Any, address: Any, index: Any) -> Any:
    floats = builder.inttoptr(address, _FLOAT.as_pointer())
    return builder.load(builder.gep(floats, [index]), align=4)


def _spread(builder: Any, value: Any) -> Any:
    """One float in every lane."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), mask)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once."""
    form = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, form, f"llvm.fma.v{LANES}f32")
    return builder.call(fma, [a, b, c])


def _zeros() -> Any:
    return ir.Constant(_VECTOR, [0.0] * LANES)


def _reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes as one, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        order = [*range(width, 2 * width), *([0] * (LANES - width))]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), order)
        vector = combine(vector, builder.shuffle_vector(vector, vector, mask))
    return builder.extract_element(vector, ir.IntType(32)(0))


def _shuffled(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return builder.shuffle_vector(a, b, mask)


def _pointer(builder: Any, address: Any, size: int) -> Any:
    return builder.inttoptr(address, ir.VectorType(_FLOAT, size).as_pointer())


@contextmanager
def _steps(builder: Any, count: Any) -> Iterator[Any]:
    """A loop over 0, LANES, 2 LANES, ... below `count`."""
    with cgutils.for_range_slice(builder, _WORD(0), count, _WORD(LANES), inc=True) as (i, _):
        yield i


def _slots(builder: Any, count: int, initial: Any) -> list[Any]:
    """Registers that a loop updates."""
    return [cgutils.alloca_once_value(builder, initial) for _ in range(count)]


@intrinsic  # type: ignore[untyped-decorator]
def largest(typing: Any, a: Any, count: Any) -> Any:  # noqa: ARG001
    """`max_i a[i]`, `-inf` of none; where there is a NaN, any of the values or NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        a, count = arguments

        def larger(x: Any, y: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        (best,) = _slots(builder, 1, ir.Constant(_VECTOR, [float("-inf")] * LANES))
        with _steps(builder, count) as i:
            builder.store(larger(_load(builder, a, i), builder.load(best)), best)
        return _reduce(builder, builder.load(best), larger)

    return types.float32(types.int64, types.int64), generate


def _vector_exp(builder: Any, x: Any) -> Any:
    """As `heddle.kernels.compiled.exp`, of a vector."""

    def constant(value: float) -> Any:
        return ir.Constant(_VECTOR, [value] * LANES)

    form = ir.FunctionType(_VECTOR, [_VECTOR])
    floor = cgutils.get_or_insert_function(builder.module, form, f"llvm.floor.v{LANES}f32")
    is_small = builder.fcmp_ordered("<", x, constant(EXP_FLOOR))
    bounded = builder.select(is_small, constant(EXP_FLOOR), x)
    n = builder.call(floor, [_fused(builder, bounded, constant(LOG2_E), constant(0.5))])
    r = _fused(builder, n, constant(-LN_2_HIGH), bounded)
    r = _fused(builder, n, constant(-LN_2_LOW), r)
    p = constant(EXP_SERIES[0])
    for coefficient in EXP_SERIES[1:]:
        p = _fused(builder, p, r, constant(coefficient))
    value = builder.fadd(_fused(builder, builder.fmul(p, r), r, r), constant(1.0))
    integers = ir.VectorType(ir.IntType(32), LANES)
    exponent = builder.add(builder.fptosi(n, integers), ir.Constant(integers, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(integers, [23] * LANES)), _VECTOR)
    return builder.select(is_small, _zeros(), builder.fmul(value, power))


@intrinsic  # type: ignore[untyped-decorator]
def scale(typing: Any, a: Any, factor: Any, count: Any) -> Any:  # noqa: ARG001
    """`a[i] *= factor`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        a, factor, count = arguments
        spread = _spread(builder, factor)
        with _steps(builder, count) as i:
            _store(builder, builder.fmul(_load(builder, a, i), spread), a, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def silu_mul(typing: Any, gate: Any, up: Any, out: Any, count: Any) -> Any:  # noqa: ARG001
    """`out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        gate, up, out, count = arguments
        one = ir.Constant(_VECTOR, [1.0] * LANES)
        with _steps(builder, count) as i:
            x = _load(builder, gate, i)
            is_negative = builder.fcmp_ordered("<", x, _zeros())
            decay = _vector_exp(builder, builder.select(is_negative, x, builder.fneg(x)))
            # exp(-|x|) cannot overflow: x / (1 + e^-x) = x e^x / (1 + e^x)
            top = builder.select(is_negative, builder.fmul(x, decay), x)
            silu = builder.fdiv(top, builder.fadd(one, decay))
            _store(builder, builder.fmul(silu, _load(builder, up, i)), out, i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def tile_product(height: int, width: int, *, adds: bool = True) -> Any:
    """An intrinsic `(a, a_row, a_step, b, b_row, c, c_row, depth)`: C += A B of one tile.

    `A[m, k]` lies at `a + 4 (m a_row + k a_step)`, `B[k, n]` at `b + 4 (k b_row + n)`, `C[m, n]` at
    `c + 4 (m c_row + n)`; m < height, n < width * LANES, k < depth. The tile of C stays in
    registers while k runs, so height * width + width + 1 should not exceed the vector registers
    (16).

    Args:
        height: rows of the tile.
        width: vectors of a row.
        adds: False: C = A B, whatever C held.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply_tile(
        typing: Any,  # noqa: ARG001
        a: Any,  # noqa: ARG001
        a_row: Any,  # noqa: ARG001
        a_step: Any,  # noqa: ARG001
        b: Any,  # noqa: ARG001
        b_row: Any,  # noqa: ARG001
        c: Any,  # noqa: ARG001
        c_row: Any,  # noqa: ARG001
        depth: Any,  # noqa: ARG001
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            a, a_row, a_step, b, b_row, c, c_row, depth = arguments
            tile = [_slots(builder, width, _zeros()) for _ in range(height)]
            with cgutils.for_range(builder, depth, intp=_WORD) as loop:
                start = builder.mul(loop.index, b_row)
                columns = [
                    _load(builder, b, builder.add(start, _WORD(LANES * n))) for n in range(width)
                ]
                step = builder.mul(loop.index, a_step)
                for m in range(height):
                    index = builder.add(builder.mul(a_row, _WORD(m)), step)
                    factor = _spread(builder, _scalar(builder, a, index))
                    for n in range(width):
                        total = _fused(builder, factor, columns[n], builder.load(tile[m][n]))
                        builder.store(total, tile[m][n])
            for m in range(height):
                for n in range(width):
                    index = builder.add(builder.mul(c_row, _WORD(m)), _WORD(LANES * n))
                    total = builder.load(tile[m][n])
                    if adds:
                        total = builder.fadd(_load(builder, c, index), total)
                    _store(builder, total, c, index)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return multiply_tile
