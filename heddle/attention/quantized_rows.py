r"""Rows of one byte an element: `x ~ scale * q`, with a scale for each part of a row.

    scale = max |x| / peak          int8: q = round(x / scale), peak 127
                                    fp8:  q = e4m3(x / scale),  peak 448

Both round half to even, in float32. The largest element of a part falls on the peak, so nothing
saturates and the whole range of codes is used.

    |x - scale * q|  <=  scale / 2                                   int8
                     <=  max(|x| / 16, scale / 1024)                 fp8: 3 bits of mantissa, least
                                                                     step 2**-9

and beside that a float32 rounding of the product. A part of zeros stays zeros, bytes of zero mean
zeros, and a part with NaN or infinity comes back as NaN, whole, so that it is found.

Legend: `W` elements of a row, `P` parts, `W' = W + 4 P` bytes of a stored row.
Source: the bounds follow from rounding to nearest on either grid; e4m3 as in Micikevicius et al.,
"FP8 formats for deep learning" (2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from heddle.layout.cache_rows import RowFormat

_PEAKS = {"fp8_e4m3": 448.0, "int8": 127.0}
_SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest scale: the least number that has no fewer bits than others."""
_LARGEST = torch.finfo(torch.float32).max * (1 - 2**-20)
"""Largest `max |x|` that a scale is made for: `peak * scale`, rounded, must stay finite."""
_E4M3_AS_HALF = 256.0
"""The bits of an e4m3 number, read as float16 with the same exponent field, are so much smaller."""
_WITHOUT_BIT_14 = ~(1 << 14)


class QuantizedRows:
    """Codec of int8 and fp8-e4m3 rows."""

    element = torch.uint8

    def __init__(self, rows: RowFormat) -> None:
        self.width = rows.width
        self._num_codes = sum(rows.parts)
        self._shapes = [(len(list(same)), width) for width, same in groupby(rows.parts)]
        """Neighbours of one width, which are worked on together: (how many, how wide)."""
        self._is_int8 = rows.dtype == "int8"
        self._peak = _PEAKS[rows.dtype]

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., W]` of any float type -> `[..., W']` bytes."""
        stored = rows.new_empty((*rows.shape[:-1], self.width), dtype=torch.uint8)
        scales = []
        targets = self._parts(stored[..., : self._num_codes])
        for parts, target in zip(self._parts(rows.float()), targets, strict=True):
            codes, scale = self._quantize(parts)
            target.copy_(codes)
            scales.append(scale.squeeze(-1))
        stored[..., self._num_codes :] = torch.cat(scales, dim=-1).view(torch.uint8)
        return stored

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[..., W']` bytes -> `[..., W]`, computed in float32."""
        scales = stored[..., self._num_codes :].contiguous().view(torch.float32)  # [..., P]
        rows = self._numbers(stored[..., : self._num_codes])
        if not self._is_int8:
            scales = scales * _E4M3_AS_HALF
        first = 0
        for parts in self._parts(rows):
            count = parts.shape[-2]
            parts.mul_(scales[..., first : first + count, None])
            first += count
        return rows.to(dtype)

    def _parts(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Views `[..., n, w]` of rows `[..., W]`: n parts of width w each."""
        start = 0
        for count, width in self._shapes:
            part = rows[..., start : start + count * width]
            yield part.view(*rows.shape[:-1], count, width)
            start += count * width

    def _quantize(self, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of parts `[..., n, w]`, and their scales `[..., n, 1]`."""
        largest = parts.abs().amax(dim=-1, keepdim=True)
        scale = (largest.clamp(max=_LARGEST) / self._peak).clamp(min=_SMALLEST)
        is_finite = largest.isfinite()
        if is_finite.all():
            return self._codes(parts / scale), scale
        # Converting NaN to an integer is undefined, so the scale alone carries it.
        codes = self._codes(parts.masked_fill(~is_finite, 0.0) / scale.masked_fill(~is_finite, 1.0))
        return codes, scale.masked_fill(~is_finite, torch.nan)

    def _codes(self, quotients: torch.Tensor) -> torch.Tensor:
        """Numbers of at most the peak as bytes."""
        if self._is_int8:
            return quotients.round_().to(torch.int8).view(torch.uint8)
        return quotients.to(torch.float8_e4m3fn).view(torch.uint8)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """Float32 numbers of codes; those of fp8 smaller by `_E4M3_AS_HALF`."""
        if self._is_int8:
            return codes.view(torch.int8).float()
        # s eeee mmm -> s 0eeee mmm0000000: a float16 with a wider exponent. The conversion of torch
        # gives the same numbers at a fraction of the speed.
        bits = codes.view(torch.int8).to(torch.int16)
        return bits.bitwise_left_shift_(7).bitwise_and_(_WITHOUT_BIT_14).view(torch.float16).float()
