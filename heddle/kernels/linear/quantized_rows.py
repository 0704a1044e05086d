"""What products of few rows make of a row first, and what they know of a packed weight.

A tile masks a number u where it stands in a half of its word, so it comes out as `2^p u`: inputs
are divided by `2^p` before. It starts its sums from `-c sum x`, c the middle of the range of u.

The bits of a whole number below 2^23, read as a float, are that number times 2^-149, a subnormal.
On a processor that multiplies subnormals at full speed no conversion is needed; inputs are brought
to about 2^125 for it by a power of two of their row. Elsewhere numbers are converted.

Legend: `K` inputs, `g` inputs of a group.
Source: our derivation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from heddle.kernels.linear.panels import WIDTH as PANEL
from heddle.kernels.vectors import (
    _VECTOR,
    _WORD,
    LANES,
    _load,
    _reduce,
    _shuffled,
    _slots,
    _spread,
    _steps,
    _store,
    _zeros,
)

SUBNORMALS_ARE_FAST = llvmlite.binding.get_host_cpu_name() == "znver1"
"""Where it was measured; others may take a hundred cycles for each."""
CHAINS = 2
"""Sums of an output, which do not wait for each other: of even and of odd inputs."""
HALF_WORD = 16
_RAISED = 125
"""Inputs of a row lie below 2^2 before, below 2^127 after."""
_SUBNORMAL = 149
_EXPONENTS = (125, 253)
"""Of units, 2^-2 to 2^126: smaller inputs lose nothing that a float32 sum would keep."""
_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """How a group of inputs lies in a panel, and what the processor is good at."""

    bits: int
    """4: with offsets; 8: without."""
    is_half: bool = False
    """Scales and offsets are float16."""
    converts: bool = not SUBNORMALS_ARE_FAST
    """Numbers become floats by an instruction."""

    @property
    def middle(self) -> int:
        """Of the range of numbers."""
        return 1 << (self.bits - 1)

    @property
    def per_word(self) -> int:
        """Numbers of a word."""
        return 32 // self.bits

    @property
    def head_bytes(self) -> int:
        """Of the scales and offsets of a group."""
        return (2 if self.bits == 4 else 1) * PANEL * (2 if self.is_half else 4)

    @property
    def lowered(self) -> float:
        """What products are too small by."""
        return 1.0 if self.converts else 2.0 ** (_RAISED - _SUBNORMAL)

    def shift(self, place: int) -> int:
        """Of a number of a word, in its half."""
        return self.bits * place % HALF_WORD

    def group_bytes(self, builder: Any, group: Any) -> Any:
        """Of a group in a panel."""
        numbers = builder.mul(group, _WORD(PANEL * self.bits // 8))
        return builder.add(numbers, _WORD(self.head_bytes))


def ints(value: int) -> Any:
    """A number in every lane."""
    return ir.Constant(_INTS, [value] * LANES)


def floats(*values: float) -> Any:
    """Some numbers, again and again."""
    return ir.Constant(_VECTOR, list(values) * (LANES // len(values)))


def spread_row(form: PackedForm) -> Any:
    """An intrinsic `(x, target, starts, groups, group) -> unit`.

    `target[K]` gets `x / unit` as tiles want it, `starts[groups, 2]` what the sums of even and odd
    inputs begin with. The unit is about the power of two below the largest input, so that no
    input leaves the range of a float.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        x, target, starts, groups, group = arguments
        exponent = _exponent(builder, x, builder.mul(groups, group))
        inverse = builder.bitcast(builder.shl(builder.sub(_INT(254), exponent), _INT(23)), _FLOAT)
        inverse = _spread(builder, inverse)
        factors = [2.0 ** -form.shift(place) for place in range(form.per_word)]
        raised = floats(1.0 if form.converts else 2.0**_RAISED)
        with cgutils.for_range(builder, groups, intp=_WORD) as loop:
            first = builder.mul(loop.index, group)
            (total,) = _slots(builder, 1, _zeros())
            with _steps(builder, group) as step:
                k = builder.add(first, step)
                value = builder.fmul(_load(builder, x, k), inverse)
                builder.store(builder.fadd(builder.load(total), value), total)
                value = builder.fmul(builder.fmul(value, raised), floats(*factors))
                _store(builder, value, target, k)
            lanes = builder.fmul(builder.load(total), floats(-form.middle * form.lowered))
            for width in (4, 2):
                order = [(lane + width) % LANES for lane in range(LANES)]
                lanes = builder.fadd(lanes, _shuffled(builder, lanes, lanes, order))
            begins = builder.inttoptr(starts, _FLOAT.as_pointer())
            for chain in range(CHAINS):
                place = builder.add(builder.mul(loop.index, _WORD(CHAINS)), _WORD(chain))
                start = builder.extract_element(lanes, _INT(chain))
                builder.store(start, builder.gep(begins, [place]), align=4)
        return builder.bitcast(builder.shl(exponent, _INT(23)), _FLOAT)

    @intrinsic  # type: ignore[untyped-decorator]
    def spread(
        typing: Any,  # noqa: ARG001
        x: Any,  # noqa: ARG001
        target: Any,  # noqa: ARG001
        starts: Any,  # noqa: ARG001
        groups: Any,  # noqa: ARG001
        group: Any,  # noqa: ARG001
    ) -> Any:
        return types.float32(*[types.int64] * 5), generate

    return spread


def _exponent(builder: Any, x: Any, count: Any) -> Any:
    """Of the largest magnitude, as a float holds it, in `_EXPONENTS`."""

    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    (best,) = _slots(builder, 1, ints(_EXPONENTS[0] << 23))
    with _steps(builder, count) as i:
        bits = builder.bitcast(_load(builder, x, i), _INTS)
        builder.store(larger(builder.and_(bits, ints((1 << 31) - 1)), builder.load(best)), best)
    exponent = builder.lshr(_reduce(builder, builder.load(best), larger), _INT(23))
    most = _INT(_EXPONENTS[1])
    return builder.select(builder.icmp_signed(">", exponent, most), most, exponent)
