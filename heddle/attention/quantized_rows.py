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

import torch

from heddle.kernels.registry import Kernels, create_kernels
from heddle.kernels.row_encode.reference import decode
from heddle.layout.cache_rows import RowFormat


class QuantizedRows:
    """Codec of int8 and fp8-e4m3 rows."""

    element = torch.uint8

    def __init__(self, rows: RowFormat, kernels: Kernels | None = None) -> None:
        """Note the format.

        Args:
            rows: a quantised format.
            kernels: who encodes; None: torch.
        """
        self.row_format = rows
        self.width = rows.width
        self._encode = (kernels or create_kernels("torch")).row_encode

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., W]` of any float type -> `[..., W']` bytes."""
        return self._encode(rows, self.row_format)

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[..., W']` bytes -> `[..., W]`, computed in float32."""
        return decode(stored, self.row_format).to(dtype)
