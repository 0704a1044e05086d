"""Register tiles whose weights are unpacked on the way, as vector instructions.

    nibble_tile(height, is_half)   out[m] += x[m] @ (d q + m), q of 4 bits, d and m per 32 inputs
    byte_tile(height)              out[m] += x[m] @ (d q), q of 8 bits, d per group of inputs
    unpack_nibbles(is_half)        the weights themselves, `[k, 16]` floats
    unpack_bytes()

Layouts are those of `heddle.kernels.linear.quantized`. Sums of a group are taken over q alone, then
scaled: `sum x (d q + m) = d sum x q + m sum x`.

A word holds 8 numbers of 4 bits as q - 8, so that they are small on either side of zero and sums
lose little. Number j is shifted to the top of its word, where its sign is the word's: as an integer
and as a float it is then `2^28 (q - 8)`, and the group's scale takes the power of two back.

Source: our derivation.
"""

from __future__ import annotations

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
    _scalar,
    _slots,
    _spread,
    _store,
    _zeros,
)

BLOCK = 32
"""Inputs that share a scale and an offset, in 4 bits."""
PER_WORD = 8
"""Numbers of 4 bits in a word."""
_PARTS = 2
"""Vectors of a panel."""
_PANEL = _PARTS * LANES
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_INNER_STEP = 8
_TOP = 28
"""Bits below the last number of a word."""
_MIDDLE = 8.0


def _at(builder: Any, address: Any, num_bytes: int | Any, kind: Any) -> Any:
    """A vector of some kind, so many bytes behind an address."""
    offset = _WORD(num_bytes) if isinstance(num_bytes, int) else num_bytes
    where = builder.inttoptr(builder.add(address, offset), kind.as_pointer())
    return builder.load(where, align=1)


def _constant(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _numbers(builder: Any, words: Any, place: int) -> Any:
    """Number `place` of each word as a float, times 2^28."""
    top = PER_WORD - 1 - place
    shifted = builder.shl(words, _constant(4 * top)) if top else words
    return builder.sitofp(builder.and_(shifted, _constant(-1 << _TOP)), _VECTOR)


def _pairs(builder: Any, block: Any, *, is_half: bool) -> tuple[list[Any], list[Any]]:
    """Scales and offsets of a block, a vector for each part of the panel."""
    kind = _HALVES if is_half else _VECTOR
    size = LANES * (2 if is_half else 4)
    loaded = [_at(builder, block, i * size, kind) for i in range(2 * _PARTS)]
    floats = [builder.fpext(v, _VECTOR) for v in loaded] if is_half else loaded
    return floats[:_PARTS], floats[_PARTS:]


def nibble_block_bytes(*, is_half: bool) -> int:
    """Of 32 inputs of a panel: scales, offsets, then the words."""
    return 2 * _PANEL * (2 if is_half else 4) + _PANEL * BLOCK // 2


def _tiles(height: int) -> range:
    return range(height * _PARTS)


def _add_to(builder: Any, tile: list[Any], out: Any, out_row: Any, height: int) -> None:
    for m in range(height):
        for part in range(_PARTS):
            index = builder.add(builder.mul(out_row, _WORD(m)), _WORD(LANES * part))
            total = builder.load(tile[m * _PARTS + part])
            _store(builder, builder.fadd(_load(builder, out, index), total), out, index)


def _row_scalar(builder: Any, x: Any, x_row: Any, m: int, index: Any) -> Any:
    """`x[m, index]` in every lane."""
    return _spread(builder, _scalar(builder, x, builder.add(builder.mul(x_row, _WORD(m)), index)))


def nibble_tile(height: int, *, is_half: bool) -> Any:
    """An intrinsic `(x, x_row, sums, sums_row, data, out, out_row, blocks)`.

    `sums[m, b]` is the sum of `x[m]` over block b; blocks of a panel lie from `data` on;
    `out[m, 16]` is added to.
    """
    size = nibble_block_bytes(is_half=is_half)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        x, x_row, sums, sums_row, data, out, out_row, blocks = arguments
        tile = _slots(builder, height * _PARTS, _zeros())
        with cgutils.for_range(builder, blocks, intp=_WORD) as loop:
            block = builder.add(data, builder.mul(loop.index, _WORD(size)))
            first = builder.mul(loop.index, _WORD(BLOCK))
            scales, offsets = _pairs(builder, block, is_half=is_half)
            words_at = size - _PANEL * BLOCK // 2
            # d q + m = d (q - 8) + (m + 8 d)
            offsets = [
                _fused(builder, ir.Constant(_VECTOR, [_MIDDLE] * LANES), d, m)
                for d, m in zip(scales, offsets, strict=True)
            ]
            down = ir.Constant(_VECTOR, [2.0**-_TOP] * LANES)
            scales = [builder.fmul(d, down) for d in scales]
            dots = [_zeros() for _ in _tiles(height)]
            for octet in range(BLOCK // PER_WORD):
                words = [
                    _at(builder, block, words_at + 4 * (octet * _PANEL + part * LANES), _INTS)
                    for part in range(_PARTS)
                ]
                for j in range(PER_WORD):
                    q = [_numbers(builder, word, j) for word in words]
                    index = builder.add(first, _WORD(octet * PER_WORD + j))
                    for m in range(height):
                        factor = _row_scalar(builder, x, x_row, m, index)
                        for part in range(_PARTS):
                            place = m * _PARTS + part
                            dots[place] = _fused(builder, factor, q[part], dots[place])
            for m in range(height):
                mass = _row_scalar(builder, sums, sums_row, m, loop.index)
                for part in range(_PARTS):
                    place = m * _PARTS + part
                    total = _fused(builder, offsets[part], mass, builder.load(tile[place]))
                    builder.store(_fused(builder, scales[part], dots[place], total), tile[place])
        _add_to(builder, tile, out, out_row, height)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        typing: Any,  # noqa: ARG001
        x: Any,  # noqa: ARG001
        x_row: Any,  # noqa: ARG001
        sums: Any,  # noqa: ARG001
        sums_row: Any,  # noqa: ARG001
        data: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        out_row: Any,  # noqa: ARG001
        blocks: Any,  # noqa: ARG001
    ) -> Any:
        return types.void(*[types.int64] * 8), generate

    return multiply


def byte_block_bytes(group: int) -> int:
    """Of a group of inputs of a panel: scales, then the numbers."""
    return 4 * _PANEL + _PANEL * group


def byte_tile(height: int) -> Any:
    """An intrinsic `(x, x_row, data, out, out_row, groups, group)`; groups are multiples of 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        x, x_row, data, out, out_row, groups, group = arguments
        tile = _slots(builder, height * _PARTS, _zeros())
        dots = _slots(builder, height * _PARTS, _zeros())
        size = builder.add(_WORD(4 * _PANEL), builder.mul(group, _WORD(_PANEL)))
        with cgutils.for_range(builder, groups, intp=_WORD) as loop:
            block = builder.add(data, builder.mul(loop.index, size))
            first = builder.mul(loop.index, group)
            for dot in dots:
                builder.store(_zeros(), dot)
            step = _WORD(_INNER_STEP)
            with cgutils.for_range_slice(builder, _WORD(0), group, step, inc=True) as (start, _):
                for j in range(_INNER_STEP):
                    k = builder.add(start, _WORD(j))
                    here = builder.add(builder.mul(k, _WORD(_PANEL)), _WORD(4 * _PANEL))
                    q = [
                        builder.sitofp(
                            builder.sext(
                                _at(builder, builder.add(block, here), LANES * part, _BYTES),
                                _INTS,
                            ),
                            _VECTOR,
                        )
                        for part in range(_PARTS)
                    ]
                    for m in range(height):
                        factor = _row_scalar(builder, x, x_row, m, builder.add(first, k))
                        for part in range(_PARTS):
                            slot = dots[m * _PARTS + part]
                            total = _fused(builder, factor, q[part], builder.load(slot))
                            builder.store(total, slot)
            scales = [_at(builder, block, 4 * LANES * part, _VECTOR) for part in range(_PARTS)]
            for place in _tiles(height):
                dot = builder.load(dots[place])
                total = _fused(builder, scales[place % _PARTS], dot, builder.load(tile[place]))
                builder.store(total, tile[place])
        _add_to(builder, tile, out, out_row, height)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        typing: Any,  # noqa: ARG001
        x: Any,  # noqa: ARG001
        x_row: Any,  # noqa: ARG001
        data: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        out_row: Any,  # noqa: ARG001
        groups: Any,  # noqa: ARG001
        group: Any,  # noqa: ARG001
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    return multiply


def unpack_nibbles(*, is_half: bool) -> Any:
    """An intrinsic `(data, out, blocks)`: the weights of blocks of a panel, `[32 blocks, 16]`."""
    size = nibble_block_bytes(is_half=is_half)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        data, out, blocks = arguments
        with cgutils.for_range(builder, blocks, intp=_WORD) as loop:
            block = builder.add(data, builder.mul(loop.index, _WORD(size)))
            first = builder.mul(loop.index, _WORD(BLOCK * _PANEL))
            scales, offsets = _pairs(builder, block, is_half=is_half)
            for octet in range(BLOCK // PER_WORD):
                for part in range(_PARTS):
                    at = size - _PANEL * BLOCK // 2 + 4 * (octet * _PANEL + part * LANES)
                    words = _at(builder, block, at, _INTS)
                    for j in range(PER_WORD):
                        low = builder.and_(builder.lshr(words, _constant(4 * j)), _constant(15))
                        low = builder.xor(low, _constant(8))
                        weight = _fused(
                            builder, scales[part], builder.sitofp(low, _VECTOR), offsets[part]
                        )
                        k = (octet * PER_WORD + j) * _PANEL + part * LANES
                        _store(builder, weight, out, builder.add(first, _WORD(k)))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def unpack(
        typing: Any,  # noqa: ARG001
        data: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        blocks: Any,  # noqa: ARG001
    ) -> Any:
        return types.void(*[types.int64] * 3), generate

    return unpack


def unpack_bytes() -> Any:
    """An intrinsic `(data, out, groups, group)`: the weights of groups of a panel."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        data, out, groups, group = arguments
        size = builder.add(_WORD(4 * _PANEL), builder.mul(group, _WORD(_PANEL)))
        with cgutils.for_range(builder, groups, intp=_WORD) as loop:
            block = builder.add(data, builder.mul(loop.index, size))
            first = builder.mul(loop.index, group)
            scales = [_at(builder, block, 4 * LANES * part, _VECTOR) for part in range(_PARTS)]
            with cgutils.for_range(builder, group, intp=_WORD) as inner:
                here = builder.mul(inner.index, _WORD(_PANEL))
                target = builder.mul(builder.add(first, inner.index), _WORD(_PANEL))
                row = builder.add(block, builder.add(here, _WORD(4 * _PANEL)))
                for part in range(_PARTS):
                    whole = builder.sext(_at(builder, row, LANES * part, _BYTES), _INTS)
                    weight = builder.fmul(scales[part], builder.sitofp(whole, _VECTOR))
                    index = builder.add(target, _WORD(LANES * part))
                    _store(builder, weight, out, index)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def unpack(
        typing: Any,  # noqa: ARG001
        data: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        groups: Any,  # noqa: ARG001
        group: Any,  # noqa: ARG001
    ) -> Any:
        return types.void(*[types.int64] * 4), generate

    return unpack
