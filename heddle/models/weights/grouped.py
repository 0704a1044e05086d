"""Integers of AWQ and GPTQ: packed into words, stored `[in, out]`, in groups of inputs.

            AWQ (gemm)          GPTQ
    X.qweight   i32 [m, n / f]      i32 [m / f, n]
    X.qzeros    i32 [groups, n / f] i32 [groups, n / f], in version 1 less one
    X.scales    [groups, n]         [groups, n]
    X.g_idx                         [m], the group of each input; without it they are in order

Sources: AutoAWQ, AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

from heddle.models.config_quantization import Quantization
from heddle.models.weights.dequantized import AffineMatrix, StoredTensor
from heddle.models.weights.numbers import WORD_BITS, PackedNumbers, PlainNumbers, num_words
from heddle.models.weights.parts import FLOATS, Parts
from heddle.models.weights.source import StoredSource

# Place in the word of the numbers 0 to 7: the writer interleaves them for its GPU kernels.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def find_awq(source: StoredSource, quantization: Quantization) -> dict[str, StoredTensor]:
    """Matrices of AWQ in its gemm layout."""
    return {parts.whole: _awq(parts, quantization) for parts in _all_parts(source)}


def find_gptq(source: StoredSource, quantization: Quantization) -> dict[str, StoredTensor]:
    """Matrices of GPTQ."""
    return {parts.whole: _gptq(parts, quantization) for parts in _all_parts(source)}


def _all_parts(source: StoredSource) -> list[Parts]:
    suffix = ".qweight"
    names = (name for name in source.names() if name.endswith(suffix))
    return [Parts(source, f"{name.removesuffix(suffix)}.weight") for name in names]


def _awq(parts: Parts, quantization: Quantization) -> AffineMatrix:
    source, bits = parts.source, quantization.bits
    codes, zeros, scales, _ = _names(parts)
    m, words = parts.matrix_shape(codes)
    n = words * (WORD_BITS // bits)
    shape, block = (n, m), (1, quantization.group_size or m)
    num_groups = -(-m // block[1])
    parts.take(codes, (m, words), ("I32",))
    parts.take(zeros, (num_groups, words), ("I32",))
    parts.take(scales, (num_groups, n), FLOATS)

    def packed(name: str) -> PackedNumbers:
        return PackedNumbers(
            source=source, name=name, bits=bits, dim=1, transposed=True, order=AWQ_ORDER
        )

    return AffineMatrix(
        shape=shape,
        codes=packed(codes),
        scales=parts.grid(PlainNumbers(source, scales, transposed=True), shape, block),
        zeros=parts.grid(packed(zeros), shape, block),
        parts=parts.used,
    )


def _gptq(parts: Parts, quantization: Quantization) -> AffineMatrix:
    source, bits = parts.source, quantization.bits
    codes, zeros, scales, index = _names(parts)
    words, n = parts.matrix_shape(codes)
    m = words * (WORD_BITS // bits)
    shape, block = (n, m), (1, quantization.group_size or m)
    num_groups = -(-m // block[1])
    parts.take(codes, (words, n), ("I32",))
    parts.take(zeros, (num_groups, num_words(n, bits)), ("I32",))
    parts.take(scales, (num_groups, n), FLOATS)
    packed_zeros = PackedNumbers(
        source=source,
        name=zeros,
        bits=bits,
        dim=1,
        transposed=True,
        added_to_words=_ones(bits) if quantization.adds_one_to_zeros else 0,
    )
    return AffineMatrix(
        shape=shape,
        codes=PackedNumbers(source=source, name=codes, bits=bits, dim=0, transposed=True),
        scales=parts.grid(PlainNumbers(source, scales, transposed=True), shape, block, index),
        zeros=parts.grid(packed_zeros, shape, block, index),
        parts=parts.used,
    )


def _names(parts: Parts) -> list[str]:
    base = parts.whole.removesuffix(".weight")
    return [f"{base}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]


def _ones(bits: int) -> int:
    """A word with a 1 in each field: writers subtract it as a whole, so that fields may borrow."""
    return sum(1 << shift for shift in range(0, WORD_BITS, bits))
