"""The header of a GGUF file: its metadata and where each tensor lies.

Layout (little-endian, versions 2 and 3)::

    "GGUF" | version u32 | tensors u64 | entries u64
    entries x (key, type u32, value)          strings are u64 length + bytes
    tensors x (name, dims u32, dim u64.., type u32, offset u64)
    padding to `general.alignment`, then the data; offsets count from here

Dimensions are stored innermost first; `GgufTensor.shape` turns them round. Source: the format
description of the ggml project.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from heddle.errors import ModelFileError, quoted
from heddle.models.config_fields import check_is_file

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies."""

    shape: tuple[int, ...]
    """Outermost dimension first."""
    type_id: int
    """Storage type: a value of the format's quantisation enumeration."""
    offset: int
    """Byte position in the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata entries by key, tensors by name."""

    path: Path
    entries: dict[str, object]
    tensors: dict[str, GgufTensor]
    size_bytes: int
    """Of the whole file."""


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Parse the header; tensor data is not touched.

    Raises:
        ModelFileError: the file is missing, is not GGUF 2 or 3, or ends inside the header.
    """
    path = Path(path)
    check_is_file(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, struct.error, RecursionError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: is not a whole GGUF file ({error})") from error


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise ModelFileError(f"{path}: starts with {magic!r}; a GGUF file starts with b'GGUF'")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ModelFileError(f"{path}: GGUF version {version}; versions 2 and 3 are read")
    num_tensors, num_entries = cursor.scalar("<Q"), cursor.scalar("<Q")
    entries: dict[str, object] = {}
    for _ in range(num_entries):
        key = cursor.text()
        if key in entries:
            raise ValueError(f"two entries have the key {quoted(key)}")
        entries[key] = cursor.value(cursor.scalar("<I"))
    infos: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name = cursor.text()
        shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))[::-1]
        infos.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = entries.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelFileError(
            f"{path}: general.alignment={alignment!r}; a positive integer expected"
        )
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: GgufTensor(shape, kind, start + offset) for name, shape, kind, offset in infos}
    if len(tensors) < len(infos):
        raise ModelFileError(f"{path}: two tensors have one name")
    return GgufHeader(path, entries, tensors, len(data))


class _Cursor:
    """Reads forward through the header; running past the end is an error, never a short read."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self._data):
            raise ValueError(f"ends at byte {len(self._data)}, inside the header")
        part = self._data[self.position : end]
        self.position = end
        return part

    def scalar(self, form: str) -> int:
        # Counts and types are the common case; `value` widens the result where it is a float.
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value  # type: ignore[no-any-return]

    def text(self) -> str:
        # Vocabularies hold single bytes of longer characters, so not every string is UTF-8.
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.scalar("<I"), self.scalar("<Q"))
        raise ValueError(f"unknown entry type {kind}")

    def _array(self, kind: int, length: int) -> list[object]:
        if kind in _SCALARS:
            form = f"<{length}{_SCALARS[kind][1:]}"
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        return [self.value(kind) for _ in range(length)]
