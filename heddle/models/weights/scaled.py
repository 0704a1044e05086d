"""Numbers of 8 bits with a scale per block: 8-bit floats, and integers of compressed-tensors.

    X.weight             f8 or i8 [n, m]
    X.weight_scale_inv   one per block (DeepSeek's files; despite its name it is multiplied)
    X.weight_scale       one per block, in other files
    X.weight_zero_point  one per block, if there are any
    X.weight_g_idx       [m], the block of each column, where columns are not in order

A block is the whole matrix, a row, a group of columns of a row, or some rows by some columns.

Sources: DeepSeek-V3's inference code, and compressed-tensors.
"""

from __future__ import annotations

from heddle.models.config_quantization import Quantization
from heddle.models.weights.dequantized import AffineMatrix, StoredTensor
from heddle.models.weights.numbers import Grid, PlainNumbers
from heddle.models.weights.parts import FLOATS, Parts
from heddle.models.weights.source import StoredSource

_EIGHT_BIT = ("F8_E4M3", "F8_E5M2", "I8")


def find_scaled(source: StoredSource, quantization: Quantization) -> dict[str, StoredTensor]:
    """Numbers of 8 bits, each stored alone."""
    found: dict[str, StoredTensor] = {}
    for name in source.names():
        if name.endswith(".weight") and source.stored_dtype(name) in _EIGHT_BIT:
            found[name] = _scaled(Parts(source, name), quantization)
    return found


def _scaled(parts: Parts, quantization: Quantization) -> AffineMatrix:
    shape = parts.matrix_shape(parts.whole)
    scale = parts.first_of((f"{parts.whole}_scale_inv", f"{parts.whole}_scale"), FLOATS)
    block = parts.block_of(scale, shape, quantization.block_shapes)
    zeros = parts.optional(f"{parts.whole}_zero_point", ("I8", *FLOATS))

    def grid(name: str) -> Grid:
        numbers = PlainNumbers(parts.source, name)
        return parts.grid(numbers, shape, block, f"{parts.whole}_g_idx")

    return AffineMatrix(
        shape=shape,
        codes=PlainNumbers(parts.source, parts.whole),
        scales=grid(scale),
        zeros=None if zeros is None else grid(zeros),
        parts=parts.used,
    )
