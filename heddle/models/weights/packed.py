"""Integers of compressed-tensors, packed into words.

    X.weight_packed      i32 [n, m / f], each field plus half its range
    X.weight_scale       one per block
    X.weight_zero_point  i32 [n / f, groups], packed along the outputs, if there are any
    X.weight_shape       n and m
    X.weight_g_idx       [m], the block of each column, where columns are not in order

Source: compressed-tensors, `pack-quantized`.
"""

from __future__ import annotations

from heddle.models.config_quantization import Quantization
from heddle.models.weights.dequantized import AffineMatrix, StoredTensor
from heddle.models.weights.numbers import PackedNumbers, PlainNumbers, num_words
from heddle.models.weights.parts import FLOATS, Parts
from heddle.models.weights.source import StoredSource


def find_packed(source: StoredSource, quantization: Quantization) -> dict[str, StoredTensor]:
    """Words of compressed-tensors."""
    found: dict[str, StoredTensor] = {}
    for name in source.names():
        if name.endswith(".weight_packed"):
            whole = name.removesuffix("_packed")
            found[whole] = _packed(Parts(source, whole), quantization)
    return found


def _packed(parts: Parts, quantization: Quantization) -> AffineMatrix:
    source, whole, index = parts.source, parts.whole, f"{parts.whole}_g_idx"
    words, shape = f"{whole}_packed", parts.told_shape(f"{whole}_shape")
    bits = parts.bits_of_words(words, shape[1], quantization.widths)
    parts.take(words, (shape[0], num_words(shape[1], bits)), ("I32",))
    scale = parts.first_of((f"{whole}_scale",), FLOATS)
    block = parts.block_of(scale, shape, quantization.block_shapes)
    half = 1 << (bits - 1)
    zeros = parts.optional(f"{whole}_zero_point", ("I32",))
    zero_grid = None
    if zeros is not None:
        parts.take(zeros, (num_words(shape[0], bits), -(-shape[1] // block[1])), ("I32",))
        packed = PackedNumbers(source=source, name=zeros, bits=bits, dim=0, subtracted=half)
        zero_grid = parts.grid(packed, shape, (1, block[1]), index)
    return AffineMatrix(
        shape=shape,
        codes=PackedNumbers(source=source, name=words, bits=bits, dim=1, subtracted=half),
        scales=parts.grid(PlainNumbers(source, scale), shape, block, index),
        zeros=zero_grid,
        parts=parts.used,
    )
