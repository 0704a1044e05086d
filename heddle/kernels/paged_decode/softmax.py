"""What stands between scores and weights, as vector instructions; numbers are powers of 2.

    exp2_sum(a, top, n)                 a[i] = 2^(a[i] - top), and their sum
    raise_peaks(peaks, tops, kept, n)   peaks[i] = max(peaks[i], tops[i]), kept[i] = 2^(old - new)
    multiply(a, b, n)                   a[i] *= b[i]
    add_product(out, a, b, n)           out[i] += a[i] b[i]

All operands are addresses of float32, any alignment of 4 bytes; counts are multiples of 8. NaN is
never larger, and stays NaN in a power.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from heddle.kernels.tiled_attention.panels import _exp2
from heddle.kernels.vectors import _fused, _load, _reduce, _slots, _spread, _steps, _store, _zeros


@intrinsic  # type: ignore[untyped-decorator]
def exp2_sum(typing: Any, a: Any, top: Any, count: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """See above; nothing lies above `top`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        a, top, count = arguments
        anchor, (total,) = _spread(builder, top), _slots(builder, 1, _zeros())
        builder.store(_zeros(), total)
        with _steps(builder, count) as i:
            value = _exp2(builder, builder.fsub(_load(builder, a, i), anchor))
            _store(builder, value, a, i)
            builder.store(builder.fadd(builder.load(total), value), total)
        return _reduce(builder, builder.load(total), builder.fadd)

    return types.float32(types.int64, types.float32, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def raise_peaks(typing: Any, peaks: Any, tops: Any, kept: Any, count: Any) -> Any:  # noqa: ARG001
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        peaks, tops, kept, count = arguments
        with _steps(builder, count) as i:
            old, top = _load(builder, peaks, i), _load(builder, tops, i)
            new = builder.select(builder.fcmp_ordered(">", top, old), top, old)
            _store(builder, _exp2(builder, builder.fsub(old, new)), kept, i)
            _store(builder, new, peaks, i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply(typing: Any, a: Any, b: Any, count: Any) -> Any:  # noqa: ARG001
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        a, b, count = arguments
        with _steps(builder, count) as i:
            _store(builder, builder.fmul(_load(builder, a, i), _load(builder, b, i)), a, i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_product(typing: Any, out: Any, a: Any, b: Any, count: Any) -> Any:  # noqa: ARG001
    """See above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        out, a, b, count = arguments
        with _steps(builder, count) as i:
            factors = _load(builder, a, i), _load(builder, b, i)
            _store(builder, _fused(builder, *factors, _load(builder, out, i)), out, i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
