"""Experts in 4-bit floats with a power of two per 32 of them (MXFP4), as gpt-oss stores them.

    X_blocks  u8 [x, n, m / 32, 16]   two numbers a byte, the first in the low half
    X_scales  u8 [x, n, m / 32]       exponents plus 127

A model asks for `X` as `[x, m, n]`: inputs, then outputs, of each of `x` experts.

Source: the Open Compute microscaling formats (MX), version 1.0, and the gpt-oss model code.
"""

from __future__ import annotations

import torch

from heddle.models.config_quantization import Quantization
from heddle.models.weights.dequantized import StoredTensor
from heddle.models.weights.parts import Parts
from heddle.models.weights.source import Span, StoredSource

_BLOCK, _BLOCK_BYTES, _EXPONENT_BIAS = 32, 16, 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def find_fp4_experts(source: StoredSource, quantization: Quantization) -> dict[str, StoredTensor]:
    """Tensors of experts."""
    del quantization  # nothing varies
    names = (name for name in source.names() if name.endswith("_blocks"))
    return {parts.whole: Fp4Experts(parts) for parts in (_parts(source, name) for name in names)}


def _parts(source: StoredSource, name: str) -> Parts:
    return Parts(source, name.removesuffix("_blocks"))


class Fp4Experts:
    """A `StoredTensor` `[x, m, n]`.

    Raises:
        ModelFileError: a part is missing, or has another shape or dtype.
    """

    def __init__(self, parts: Parts) -> None:
        self._source = parts.source
        self._blocks, self._scales = f"{parts.whole}_blocks", f"{parts.whole}_scales"
        num_experts, n, num_blocks = (*parts.source.shape(self._blocks), 0, 0, 0)[:3]
        parts.take(self._blocks, (num_experts, n, num_blocks, _BLOCK_BYTES), ("U8",))
        parts.take(self._scales, (num_experts, n, num_blocks), ("U8",))
        self.shape: tuple[int, ...] = (num_experts, num_blocks * _BLOCK, n)
        self.parts: tuple[str, ...] = parts.used

    def read(self, spans: tuple[Span, ...]) -> torch.Tensor:
        """`[experts, inputs, outputs]` float32."""
        experts, (start, end), outputs = spans
        blocks = (start // _BLOCK, -(-end // _BLOCK))
        stored = self._source.read_stored(self._blocks, experts, outputs, blocks)
        halves = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)  # [x, n, b, 32]
        positive = torch.tensor(_MAGNITUDES)
        values = torch.cat([positive, -positive])[halves.to(torch.int64)]
        scales = self._source.read_stored(self._scales, experts, outputs, blocks)
        exponents = scales.to(torch.int32) - _EXPONENT_BIAS
        values = torch.ldexp(values, exponents[..., None]).flatten(2)
        return values.narrow(2, start % _BLOCK, end - start).transpose(1, 2)
