"""How one row of the cache lies in memory and travels: elements, or bytes with scales behind them.

A plain type stores the `W` elements of a row as they are. A quantised type stores one byte for each
and one float32 scale for each part, in one run of bytes, so that one write, one gather and one copy
move everything that belongs to a row:

    GQA       | key: D x 1 byte | value: D x 1 byte | key scale: 4 | value scale: 4 |
    MLA       | latent | rotary key |               | scale of each: 4 |
    sparse    | latent | rotary key | index key |   | scale of each: 4 |

A part has its own scale because its size has nothing to do with that of its neighbours: keys are
often far larger than values. Memory, messages and prices all read this one description.

Legend: `W` elements of a row and kv head, `D` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle.config.model import ModelConfig

DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Types in which a model can compute, and a cache can store."""
QUANTIZED = ("fp8_e4m3", "int8")
"""Types that a cache alone can have: a byte an element, and scales."""
CACHE_DTYPES = (*DTYPE_BYTES, *QUANTIZED)
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The row of one token and one kv head."""

    dtype: str
    """One of `CACHE_DTYPES`."""
    parts: tuple[int, ...]
    """Elements of each part; they add up to `W`."""

    @property
    def is_quantized(self) -> bool:
        """The row is bytes and scales."""
        return self.dtype in QUANTIZED

    @property
    def element(self) -> str:
        """Type of the tensor that holds rows, and of the messages that carry them."""
        return "uint8" if self.is_quantized else self.dtype

    @property
    def width(self) -> int:
        """Elements of that tensor for a row, scales included."""
        scales = SCALE_BYTES * len(self.parts) if self.is_quantized else 0
        return sum(self.parts) + scales

    @property
    def row_bytes(self) -> int:
        """Bytes of a row.

        Example:
            >>> [RowFormat(dtype, (64, 64)).row_bytes for dtype in ("float32", "bfloat16", "int8")]
            [512, 256, 136]
        """
        return self.width * (1 if self.is_quantized else DTYPE_BYTES[self.dtype])


def row_format(model: ModelConfig, dtype: str) -> RowFormat:
    """The format of a model's rows.

    Args:
        model: its widths.
        dtype: of the cache, `auto` resolved.
    """
    if model.mla is None:
        return RowFormat(dtype, (model.head_dim, model.head_dim))
    parts = (model.mla.kv_lora_rank, model.mla.qk_rope_head_dim)
    return RowFormat(dtype, parts if model.sparse is None else (*parts, model.sparse.head_dim))
