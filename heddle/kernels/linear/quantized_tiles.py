"""Register tiles whose weights are unpacked on the way, as vector instructions.

    packed_tile(form, m)     out[m] += x[m] @ w, a panel of packed weights
    unpack(form)             the weights themselves, `[k, 16]` floats

Layouts are those of `heddle.kernels.linear.quantized`. A number u is masked where it stands in a
half of its word, and nothing is shifted but the upper half; rows come as `spread_row` makes them.
With c the middle of the range of u, sums start from `-c sum x`, end as `sum x (u - c)`, and stay
small on the way:

    4 bits    sum x (d u + m) = d sum x (u - 8) + (m + 8 d) sum x
    8 bits    sum x d (u - 128)

Source: our derivation.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from heddle.kernels.linear.panels import WIDTH as PANEL
from heddle.kernels.linear.quantized_rows import (
    CHAINS,
    HALF_WORD,
    PackedForm,
    floats,
    ints,
)
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

_PARTS = 2
"""Vectors of a panel."""
_LINE = 4 * PANEL
"""Bytes of a word of each output."""
_AHEAD = 1280
"""Bytes that are asked for before they are needed."""
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


def _at(builder: Any, address: Any, num_bytes: int, kind: Any) -> Any:
    """A vector of some kind, so many bytes behind an address."""
    where = builder.inttoptr(builder.add(address, _WORD(num_bytes)), kind.as_pointer())
    return builder.load(where, align=1)


def _head(builder: Any, block: Any, form: PackedForm) -> list[Any]:
    """Scales of a group, then offsets, a vector for each part of the panel."""
    kind = _HALVES if form.is_half else _VECTOR
    size = LANES * (2 if form.is_half else 4)
    loaded = [_at(builder, block, at, kind) for at in range(0, form.head_bytes, size)]
    return [builder.fpext(v, _VECTOR) for v in loaded] if form.is_half else loaded


def _prefetch(builder: Any, address: Any) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    where = builder.inttoptr(builder.add(address, _WORD(_AHEAD)), byte)
    builder.call(function, [where, _INT(0), _INT(3), _INT(1)])


def packed_tile(form: PackedForm, height: int) -> Any:
    """An intrinsic `(x, row, starts, units, data, out, out_row, groups, group)`.

    Of each row `x[m, K]`, `starts[m, groups, 2]` and `units[m]` lie `row` floats behind those of
    the row before; groups of a panel lie from `data` on; `out[m, 16]` is added to.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        x, row, starts, units, data, out, out_row, groups, group = arguments
        places = [(m, part) for m in range(height) for part in range(_PARTS)]
        tile = dict(zip(places, _slots(builder, len(places), _zeros()), strict=True))
        dots = [
            dict(zip(places, _slots(builder, len(places), _zeros()), strict=True))
            for _ in range(CHAINS)
        ]

        def of_row(address: Any, m: int, index: Any) -> Any:
            offset = builder.add(builder.mul(row, _WORD(m)), index)
            return _spread(builder, _scalar(builder, address, offset))

        def add_octet(block: Any, first: Any, octet: Any) -> None:
            lines = LANES // form.per_word
            for line in range(lines):
                at = builder.mul(
                    builder.add(builder.mul(octet, _WORD(lines)), _WORD(line)), _WORD(_LINE)
                )
                here = builder.add(block, at)
                _prefetch(builder, here)
                low = [
                    _at(builder, here, form.head_bytes + 4 * LANES * p, _INTS)
                    for p in range(_PARTS)
                ]
                high = [builder.lshr(words, ints(HALF_WORD)) for words in low]
                for place in range(form.per_word):
                    words = low if form.bits * place < HALF_WORD else high
                    mask = ints((1 << form.bits) - 1 << form.shift(place))
                    numbers = [builder.and_(word, mask) for word in words]
                    read = builder.sitofp if form.converts else builder.bitcast
                    k = builder.add(
                        builder.mul(octet, _WORD(LANES)), _WORD(line * form.per_word + place)
                    )
                    factors = [of_row(x, m, builder.add(first, k)) for m in range(height)]
                    chain = dots[place % CHAINS]
                    for m, part in places:
                        slot, number = chain[m, part], read(numbers[part], _VECTOR)
                        builder.store(_fused(builder, factors[m], number, builder.load(slot)), slot)

        size = form.group_bytes(builder, group)
        with cgutils.for_range(builder, groups, intp=_WORD) as loop:
            block = builder.add(data, builder.mul(loop.index, size))
            pair = builder.mul(loop.index, _WORD(CHAINS))
            begins = [
                [of_row(starts, m, builder.add(pair, _WORD(c))) for c in range(CHAINS)]
                for m in range(height)
            ]
            for m, part in places:
                for begin, dot in zip(begins[m], dots, strict=True):
                    builder.store(begin, dot[m, part])
            first = builder.mul(loop.index, group)
            octets = builder.udiv(group, _WORD(LANES))
            with cgutils.for_range(builder, octets, intp=_WORD) as inner:
                add_octet(block, first, inner.index)
            head = _head(builder, block, form)
            for m, part in places:
                dot = builder.fadd(*(builder.load(chain[m, part]) for chain in dots))
                total = builder.load(tile[m, part])
                if form.bits == 4:
                    # (m + 8 d) sum x, of which the sums began with -8 sum x
                    offset = _fused(
                        builder,
                        head[_PARTS + part],
                        floats(-1 / form.middle),
                        builder.fneg(head[part]),
                    )
                    mass = builder.fadd(*begins[m])
                    total = _fused(builder, offset, mass, total)
                builder.store(_fused(builder, head[part], dot, total), tile[m, part])
        for m, part in places:
            total = builder.fmul(builder.load(tile[m, part]), floats(1 / form.lowered))
            total = builder.fmul(total, of_row(units, m, _WORD(0)))
            index = builder.add(builder.mul(out_row, _WORD(m)), _WORD(LANES * part))
            _store(builder, builder.fadd(_load(builder, out, index), total), out, index)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        typing: Any,  # noqa: ARG001
        x: Any,  # noqa: ARG001
        row: Any,  # noqa: ARG001
        starts: Any,  # noqa: ARG001
        units: Any,  # noqa: ARG001
        data: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        out_row: Any,  # noqa: ARG001
        groups: Any,  # noqa: ARG001
        group: Any,  # noqa: ARG001
    ) -> Any:
        return types.void(*[types.int64] * 9), generate

    return multiply


def unpack(form: PackedForm) -> Any:
    """An intrinsic `(data, out, groups, group)`: the weights of groups of a panel, `[k, 16]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        data, out, groups, group = arguments
        size = form.group_bytes(builder, group)
        lines = builder.udiv(group, _WORD(form.per_word))
        with cgutils.for_range(builder, groups, intp=_WORD) as loop:
            block = builder.add(data, builder.mul(loop.index, size))
            head = _head(builder, block, form)
            first = builder.mul(loop.index, group)
            with cgutils.for_range(builder, lines, intp=_WORD) as inner:
                here = builder.add(block, builder.mul(inner.index, _WORD(_LINE)))
                k = builder.add(first, builder.mul(inner.index, _WORD(form.per_word)))
                for part in range(_PARTS):
                    words = _at(builder, here, form.head_bytes + 4 * LANES * part, _INTS)
                    for place in range(form.per_word):
                        number = builder.lshr(words, ints(form.bits * place))
                        number = builder.and_(number, ints((1 << form.bits) - 1))
                        if form.bits == 4:
                            value = builder.sitofp(number, _VECTOR)
                            weight = _fused(builder, head[part], value, head[_PARTS + part])
                        else:
                            value = builder.sitofp(builder.sub(number, ints(form.middle)), _VECTOR)
                            weight = builder.fmul(head[part], value)
                        index = builder.mul(builder.add(k, _WORD(place)), _WORD(PANEL))
                        _store(builder, weight, out, builder.add(index, _WORD(LANES * part)))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def unpack_groups(
        typing: Any,  # noqa: ARG001
        data: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        groups: Any,  # noqa: ARG001
        group: Any,  # noqa: ARG001
    ) -> Any:
        return types.void(*[types.int64] * 4), generate

    return unpack_groups
