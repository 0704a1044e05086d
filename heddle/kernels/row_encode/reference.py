"""What encoding means, in plain torch: `x ~ scale * q`, with a scale for each part of a row.

    scale = max |x| / peak          int8: q = round(x / scale), peak 127
                                    fp8:  q = e4m3(x / scale),  peak 448

Both round half to even, in float32. The largest element of a part falls on the peak, so nothing
saturates and the whole range of codes is used. A part with NaN or infinity has codes of 0 and a
scale of NaN.

Legend: `W` elements of a row, `P` parts, `W' = W + 4 P` bytes of a stored row.
Source: e4m3 as in Micikevicius et al., "FP8 formats for deep learning" (2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import groupby

import torch

from heddle.layout.cache_rows import RowFormat

PEAKS = {"fp8_e4m3": 448.0, "int8": 127.0}
SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest scale: the least number that has no fewer bits than others."""
LARGEST = torch.finfo(torch.float32).max * (1 - 2**-20)
"""Largest `max |x|` that a scale is made for: `peak * scale`, rounded, must stay finite."""

E4M3_AS_HALF = 256.0
"""The bits of an e4m3 number, read as float16 with the same exponent field, are so much smaller."""
_WITHOUT_BIT_14 = ~(1 << 14)


def encode(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """Quantise rows, each by itself.

    Args:
        rows: `[..., W]` of any float type.
        row_format: of the cache; quantised.

    Returns:
        `[..., W']` bytes: codes, then a float32 scale for each part.
    """
    stored = rows.new_empty((*rows.shape[:-1], row_format.width), dtype=torch.uint8)
    num_codes = sum(row_format.parts)
    scales = []
    targets = split(stored[..., :num_codes], row_format.parts)
    for parts, target in zip(split(rows.float(), row_format.parts), targets, strict=True):
        codes, scale = _quantize(parts, row_format.dtype)
        target.copy_(codes)
        scales.append(scale.squeeze(-1))
    stored[..., num_codes:] = torch.cat(scales, dim=-1).view(torch.uint8)
    return stored


def decode(stored: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """Numbers of quantised rows.

    Args:
        stored: `[..., W']` bytes.
        row_format: that they were encoded in.

    Returns:
        `[..., W]` float32: codes times their scales, rounded once.
    """
    num_codes = sum(row_format.parts)
    scales = stored[..., num_codes:].contiguous().view(torch.float32)  # [..., P]
    rows = _numbers(stored[..., :num_codes], row_format.dtype)
    if row_format.dtype != "int8":
        scales = scales * E4M3_AS_HALF
    first = 0
    for parts in split(rows, row_format.parts):
        count = parts.shape[-2]
        parts.mul_(scales[..., first : first + count, None])
        first += count
    return rows


def split(rows: torch.Tensor, parts: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Views `[..., n, w]` of rows `[..., W]`: n neighbouring parts of one width w each."""
    start = 0
    for count, width in _shapes(parts):
        part = rows[..., start : start + count * width]
        yield part.view(*rows.shape[:-1], count, width)
        start += count * width


@cache
def _shapes(parts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Neighbours of one width, which are worked on together: (how many, how wide)."""
    return [(len(list(same)), width) for width, same in groupby(parts)]


def _quantize(parts: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of parts `[..., n, w]`, and their scales `[..., n, 1]`."""
    largest = parts.abs().amax(dim=-1, keepdim=True)
    scale = (largest.clamp(max=LARGEST) / PEAKS[dtype]).clamp(min=SMALLEST)
    is_finite = largest.isfinite()
    if is_finite.all():
        return _codes(parts / scale, dtype), scale
    # Converting NaN to an integer is undefined, so the scale alone carries it.
    kept, divisor = parts.masked_fill(~is_finite, 0.0), scale.masked_fill(~is_finite, 1.0)
    return _codes(kept / divisor, dtype), scale.masked_fill(~is_finite, torch.nan)


def _codes(quotients: torch.Tensor, dtype: str) -> torch.Tensor:
    """Numbers of at most the peak as bytes."""
    if dtype == "int8":
        return quotients.round_().to(torch.int8).view(torch.uint8)
    return quotients.to(torch.float8_e4m3fn).view(torch.uint8)


def _numbers(codes: torch.Tensor, dtype: str) -> torch.Tensor:
    """Float32 numbers of codes; those of fp8 smaller by `E4M3_AS_HALF`."""
    if dtype == "int8":
        return codes.view(torch.int8).float()
    # s eeee mmm -> s 0eeee mmm0000000: a float16 with a wider exponent. The conversion of torch
    # gives the same numbers at a fraction of the speed.
    bits = codes.view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(_WITHOUT_BIT_14).view(torch.float16).float()
