"""What lies on disk, by the headers of the files: form, size, and bytes of each storage type.

Nothing is opened as weights here, so a checkpoint with a missing or damaged part can still be
described.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.models.gguf_header import read_gguf_header

_INDEX = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The files of a checkpoint."""

    form: str
    """`safetensors`, `gguf`, or `none`."""
    num_files: int
    num_bytes: int
    """Of all files together."""
    num_tensors: int
    type_bytes: dict[str, int]
    """Bytes of tensors by storage type, as the format spells it; the largest first."""
    missing_files: tuple[str, ...] = ()
    """Shards that the index names."""
    unreadable_files: tuple[str, ...] = ()


def describe_stored(path: Path) -> StoredWeights:
    """Describe the files of a model.

    Args:
        path: a `.gguf` file, or a folder.
    Raises:
        ModelFileError: a GGUF file has no readable header.
    """
    if path.suffix == ".gguf":
        return _describe_gguf(path)
    files, unreadable = [], []
    types: Counter[str] = Counter()
    num_tensors = 0
    names = _file_names(path)
    for name in names:
        if not (path / name).is_file():
            continue
        files.append(path / name)
        try:
            found = list(_safetensors_types(path / name))
        except (ValueError, KeyError, TypeError, AttributeError, struct.error):
            unreadable.append(name)
            continue
        num_tensors += len(found)
        for kind, num_bytes in found:
            types[kind] += num_bytes
    return StoredWeights(
        form="safetensors" if names else "none",
        num_files=len(files),
        num_bytes=sum(file.stat().st_size for file in files),
        num_tensors=num_tensors,
        type_bytes=dict(types.most_common()),
        missing_files=tuple(name for name in names if not (path / name).is_file()),
        unreadable_files=tuple(unreadable),
    )


def _file_names(folder: Path) -> list[str]:
    """Files that the index names, else all that are there."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return sorted(file.name for file in folder.glob("*.safetensors"))


def _safetensors_types(path: Path) -> Iterator[tuple[str, int]]:
    """(storage type, bytes) of each tensor.

    Layout: header length u64, header JSON `{name: {dtype, shape, data_offsets}}`, data.
    """
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield str(entry["dtype"]), int(end) - int(start)


def _describe_gguf(path: Path) -> StoredWeights:
    import gguf  # numpy comes with it

    header = read_gguf_header(path)
    types: Counter[str] = Counter()
    for tensor in header.tensors.values():
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
        except ValueError:  # newer than the library
            types[f"type {tensor.type_id}"] += 0
            continue
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        types[kind.name] += math.prod(tensor.shape) // block * block_bytes
    return StoredWeights(
        form="gguf",
        num_files=1,
        num_bytes=header.size_bytes,
        num_tensors=len(header.tensors),
        type_bytes=dict(types.most_common()),
    )
