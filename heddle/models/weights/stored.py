"""What lies on disk, by the headers of the files: form, size, and bytes of each storage type.

Nothing is opened as weights here, so a checkpoint with a missing or damaged part can still be
described.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from heddle.errors import ModelFileError
from heddle.models.config_fields import Fields, read_json_object
from heddle.models.gguf_header import read_gguf_header
from heddle.models.weights.safetensors_header import INDEX_NAME, read_header


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
        if not _is_file(path / name):
            continue
        files.append(path / name)
        try:
            header = read_header(path / name)
        except ModelFileError:
            unreadable.append(name)
            continue
        num_tensors += len(header)
        for info in header.values():
            types[info.dtype] += info.num_bytes
    return StoredWeights(
        form="safetensors" if names else "none",
        num_files=len(files),
        num_bytes=sum(file.stat().st_size for file in files),
        num_tensors=num_tensors,
        type_bytes=dict(types.most_common()),
        missing_files=tuple(name for name in names if not _is_file(path / name)),
        unreadable_files=tuple(unreadable),
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than any file's
        return False


def _file_names(folder: Path) -> list[str]:
    """Files that the index names, else all that are there."""
    try:
        index = Fields(folder / INDEX_NAME, read_json_object(folder / INDEX_NAME))
        section = index.section("weight_map")
        names = {section.file_name(name) for name in section or ()} if section else set()
    except ModelFileError:
        names = set()
    return sorted(names or {file.name for file in folder.glob("*.safetensors")})


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
