"""The header of a safetensors file: where each tensor lies.

Layout: header length u64, header JSON `{name: {dtype, shape, data_offsets}}`, data; offsets count
from the end of the header. Whether the data is whole is not looked at.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.errors import ModelFileError

INDEX_NAME = "model.safetensors.index.json"
"""Names the file of each tensor, where there are several."""
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library allows."""


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
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its length would be {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        start = _LENGTH.size + length
        return {name: _info(entry, start) for name, entry in header.items()}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        struct.error,
    ) as error:
        raise ModelFileError(f"{path}: has no header of a safetensors file ({error})") from error


def _info(entry: dict[str, Any], start: int) -> StoredInfo:
    """Of a tensor.

    Args:
        entry: what the header says of it.
        start: byte position of the data in the file.
    """
    first, last = map(int, entry["data_offsets"])
    return StoredInfo(str(entry["dtype"]), tuple(entry["shape"]), start + first, last - first)
