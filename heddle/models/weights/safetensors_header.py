"""The header of a safetensors file: where each tensor lies.

Layout: header length u64, header JSON `{name: {dtype, shape, data_offsets}}`, data; offsets count
from the end of the header. Whether the data is whole is not looked at; that shape, dtype and
offsets of a tensor agree is, in integers of Python, which have no end.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.errors import ModelFileError, quoted
from heddle.models.config_fields import MAX_SIZE, check_is_file

INDEX_NAME = "model.safetensors.index.json"
"""Names the file of each tensor, where there are several."""
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library allows."""
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Of a number; a dtype that is not here is one of the format that came later."""


@dataclass(frozen=True, slots=True)
class StoredInfo:
    """A tensor in the file."""

    dtype: str
    """As the format spells it."""
    shape: tuple[int, ...]
    offset: int
    """Byte position in the file."""
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredInfo]:
    """Read where the tensors of a file lie, by name.

    Raises:
        ModelFileError: the file cannot be read, or does not start with such a header.
    """
    try:
        check_is_file(path)
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its length would be {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError(f"it holds a {type(header).__name__}")
        header.pop("__metadata__", None)
        start = _LENGTH.size + length
        return {name: _info(entry, start) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, RecursionError, struct.error) as error:
        raise ModelFileError(f"{path}: has no header of a safetensors file ({error})") from error


def _info(entry: Any, start: int) -> StoredInfo:
    """Of a tensor.

    Args:
        entry: what the header says of it.
        start: byte position of the data in the file.

    Raises:
        ValueError: it is not of the format, or contradicts itself.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"a tensor is {quoted(entry)}")
    dtype, shape, extent = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"dtype={quoted(dtype)}")
    # An empty tensor has no bytes by which its other dimensions could be wrong.
    if not _are_counts(shape) or math.prod(filter(None, shape)) > MAX_SIZE:
        raise ValueError(f"shape={quoted(shape)}")
    if not _are_counts(extent) or len(extent) != 2 or extent[0] > extent[1]:
        raise ValueError(f"data_offsets={quoted(extent)}")
    num_bytes = extent[1] - extent[0]
    bits = math.prod(shape) * DTYPE_BITS.get(dtype, 0)
    if dtype in DTYPE_BITS and bits != 8 * num_bytes:
        raise ValueError(f"{num_bytes} bytes for shape={quoted(shape)} of {dtype}")
    return StoredInfo(dtype, tuple(shape), start + extent[0], num_bytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_SIZE
        for item in value
    )
