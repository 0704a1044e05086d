"""What the files of a model should be: sizes and sha256 sums, written once, compared in each load.

safetensors and GGUF have no checksums, so a damaged payload loads without a word. A manifest beside
the files, or one that is named, says what they were when somebody trusted them:

    {"format": 1, "files": {"model.safetensors": {"bytes": ..., "sha256": ...}, ...}}

Sizes are compared in every load. Summing up a large file takes seconds, so that a sum has been
found right is remembered in the cache folder, by the file's place, size, times and inode; the ranks
of a host wait for the one that sums up.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from heddle.config.folders import default_cache_dir
from heddle.errors import ModelFileError
from heddle.models.config_fields import read_json_object

MANIFEST_NAME = "heddle-manifest.json"
_FORMAT = 1
_WEIGHTS = (".safetensors", ".gguf")
_READ_TOO = (".json", ".jinja", ".model")
_CHUNK_BYTES = 1 << 22
_MAX_REMEMBERED = 4096


def manifest_path(model: Path) -> Path:
    """Where the manifest of a model lies: in its folder, or beside its `.gguf` file."""
    return model / MANIFEST_NAME if model.is_dir() else Path(f"{model}.{MANIFEST_NAME}")


def write_manifest(model: Path) -> Path:
    """Sum up all files of a model as they are now; returns where the sums are.

    Args:
        model: a folder or a `.gguf` file.
    Raises:
        ModelFileError: there are no weights, or a file cannot be read or written.
    """
    files = _files(model)
    if not any(path.suffix in _WEIGHTS for path in files.values()):
        raise ModelFileError(f"{model}: no weights to sum up; a manifest names at least one file")
    entries = {
        name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for name, path in files.items()
    }
    target = manifest_path(model)
    text = json.dumps({"format": _FORMAT, "files": entries}, indent=1)
    _replace(target, f"{text}\n")
    return target


def check_manifest(
    model: Path,
    manifest: Path | None = None,
    *,
    memory: Path | None = None,
    trusts_memory: bool = True,
) -> bool:
    """Hold the files of a model to its manifest.

    Args:
        model: a folder or a `.gguf` file.
        manifest: None: the one beside the model, if there is one.
        memory: where sums that were right are remembered; None: in the cache folder.
        trusts_memory: do not sum up again what was right before and has not changed since.
    Returns:
        Whether there is a manifest.
    Raises:
        ModelFileError: a file is absent, foreign, of another size or of another sum; names the file
            and what to do.
    """
    source = manifest or manifest_path(model)
    if manifest is None and not source.is_file():
        return False
    entries, files = _read(source), _files(model)
    for name, (size, _) in entries.items():
        if name not in files:
            raise _trouble(source, f"{model}: {name} is missing; {source} names it")
        if (found := files[name].stat().st_size) != size:
            raise _trouble(source, f"{files[name]}: has {found} bytes; {source} says {size}")
    for name, path in files.items():
        if name not in entries and path.suffix in _WEIGHTS:
            raise _trouble(source, f"{path}: is there; {source} does not name it")
    _check_sums(source, entries, files, memory, trusts_memory)
    return True


def _check_sums(
    source: Path,
    entries: Mapping[str, tuple[int, str]],
    files: Mapping[str, Path],
    memory: Path | None,
    trusts_memory: bool,
) -> None:
    with _remembered(memory or default_cache_dir() / "sums.json") as known:
        for name, (_, expected) in entries.items():
            key = _key(files[name])
            if trusts_memory and known.get(key) == expected:
                continue
            if (found := _sha256(files[name])) != expected:
                raise _trouble(
                    source, f"{files[name]}: its sha256 is {found}; {source} says {expected}"
                )
            known[key] = expected


def _trouble(source: Path, what: str) -> ModelFileError:
    return ModelFileError(
        f"{what}; fetch the file again, or, if it was changed on purpose, write {source.name} anew "
        "with `heddle doctor MODEL --manifest`"
    )


def _files(model: Path) -> dict[str, Path]:
    """Everything that is read of a model, by name."""
    if not model.is_dir():
        return {model.name: model}
    return {
        path.name: path
        for path in sorted(model.iterdir())
        if path.suffix in (*_WEIGHTS, *_READ_TOO)
        and not path.name.endswith(MANIFEST_NAME)
        and path.is_file()
    }


def _read(source: Path) -> dict[str, tuple[int, str]]:
    """(size, sum) by name."""
    try:
        document: Any = read_json_object(source)
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r} is not known; {_FORMAT} is")
        entries = {
            name: (operator.index(entry["bytes"]), str(entry["sha256"]))
            for name, entry in document["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(
            f"{source}: is no manifest ({type(error).__name__}: {error}); `heddle doctor MODEL "
            "--manifest` writes one"
        ) from error
    if not entries:
        raise ModelFileError(f"{source}: names no files; it would vouch for nothing")
    return entries


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                hasher.update(piece)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    return hasher.hexdigest()


def _key(path: Path) -> str:
    """A file as it is now; other bytes under the same key would need a forged clock."""
    info = path.resolve().stat()
    place = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    return f"{path.resolve()} {' '.join(map(str, place))}"


@contextmanager
def _remembered(memory: Path) -> Iterator[dict[str, str]]:
    """Sums that were right, by file; what is added is kept. A folder that cannot be written costs
    time and nothing else.
    """
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{memory}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield {}
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known: dict[str, str] = {}
        with suppress(OSError, ValueError, TypeError, RecursionError):
            found = json.loads(memory.read_text(encoding="utf-8"))
            known = {str(key): str(value) for key, value in dict(found).items()}
        before = dict(known)
        yield known
        if known != before:
            kept = dict(list(known.items())[-_MAX_REMEMBERED:])
            with suppress(ModelFileError):
                _replace(memory, json.dumps(kept))
    finally:
        os.close(lock)


def _replace(target: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ModelFileError(f"{target}: cannot be written ({error.strerror or error})") from error
