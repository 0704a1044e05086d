"""What kernels in Triton share: exact products of mixed types, a tanh, the choice of tiles.

A product of a float32 tile with a 16-bit tile is taken on the tensor cores of the 16-bit type, by
cutting the float32 numbers in parts of that type, each the rounded rest of those before:

    a = a_1 + a_2 + a_3          bfloat16: 3 x 8 bits of mantissa    float16: 3 x 11 bits

so that nothing but the float32 sum is rounded. Casting `a` to 16 bits, as is common for the weights
of values, would make the error of a bfloat16 cache some thousand times larger.

Kernels never ask a device anything. They run compiled on one, or interpreted (`TRITON_INTERPRET=1`
when triton is first imported); the interpreter multiplies bit patterns where both sides are
bfloat16, so there `upcast` gives the same products in float32.

Legend: `M`, `N`, `K` sides of tiles.
Source: splitting of operands as in Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial
intelligence datatype for higher-precision computations" (2019).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MIN_DOT_SIDE = 16
"""Smallest side of a tile that the tensor cores take."""
OPTIONS: dict[str, object] = {"enable_fp_fusion": True}
"""Of every launch: multiply-adds round once; the default is about to change."""
_MANTISSA_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@triton.jit  # type: ignore[untyped-decorator]
def dot_in_parts(a, b, total, num_parts: tl.constexpr, upcast: tl.constexpr):
    """`total + a @ b` in float32: a `[M, K]` float32, b `[K, N]` of any type, in exact products."""
    rest = a
    for _ in tl.static_range(num_parts):
        part = rest.to(b.dtype)
        rest = rest - part.to(tl.float32)
        if upcast:
            total = tl.dot(part.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(part, b, total, input_precision="ieee")
    return total


@triton.jit
def tanh(x):
    """tanh of float32 numbers, within 3 units in the last place: a series near 0, else by exp."""
    magnitude = tl.abs(x)
    shrunk = tl.exp(-2.0 * magnitude)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    square = x * x
    series = -1382.0 / 155925.0
    series = series * square + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = magnitude + magnitude * square * series
    folded = tl.where(magnitude < 0.3, near, far)
    return tl.where(x < 0.0, -folded, folded)


def is_interpreted() -> bool:
    """Whether triton, as it was imported, interprets kernels on the CPU."""
    return not isinstance(tanh, triton.runtime.JITFunction)


def num_parts(given: torch.dtype, target: torch.dtype) -> int:
    """Parts of type `target` that add up to a number of type `given`.

    Example:
        >>> num_parts(torch.float32, torch.bfloat16), num_parts(torch.float16, torch.float16)
        (3, 1)
    """
    return -(-_MANTISSA_BITS[given] // _MANTISSA_BITS[target])


def padded(width: int, least: int = 1) -> int:
    """The smallest power of two that is at least `width` and `least`: a side of a tile.

    Example:
        >>> padded(80), padded(1, MIN_DOT_SIDE)
        (128, 16)
    """
    return max(least, 1 << (width - 1).bit_length())
