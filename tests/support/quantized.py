"""Rows as a quantised cache gives them back, element by element: an oracle that imports nothing of
ours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]


def e4m3_numbers() -> Floats:
    """Every finite number of the format that is not negative: 4 bits of exponent, 3 of mantissa."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(subnormal + normal[:-1])  # the last code is NaN


def nearest_e4m3(values: Floats) -> Floats:
    """The nearest number of the format; of two, the one with the even mantissa."""
    numbers = e4m3_numbers()
    above = np.clip(np.searchsorted(numbers, np.abs(values)), 1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    to_low, to_high = np.abs(values) - low, high - np.abs(values)
    is_low = (to_low < to_high) | ((to_low == to_high) & ((above - 1) % 2 == 0))
    return np.copysign(np.where(is_low, low, high), values)


def rounded(rows: torch.Tensor, part: int, dtype: str) -> torch.Tensor:
    """Rows `[..., W]` of finite numbers of ordinary size.

    Args:
        rows: any float type.
        part: elements that share a scale; it divides `W`.
        dtype: `int8` or `fp8_e4m3`.
    """
    numbers = rows.float().numpy().reshape(*rows.shape[:-1], -1, part)
    largest = np.abs(numbers).max(axis=-1, keepdims=True)
    scale = largest / np.float32(127 if dtype == "int8" else 448)
    quotient = (numbers / np.where(scale == 0, np.float32(1), scale)).astype(np.float64)
    codes = np.round(quotient) if dtype == "int8" else nearest_e4m3(quotient)
    return torch.from_numpy(codes.astype(np.float32) * scale).reshape(rows.shape).to(rows.dtype)
