"""What files were when they were loaded: new ranks must not load others in silence.

Whoever replaces the files of a model while it runs does so for the next start. Ranks that are
started anew would be that start, in the middle of answers that other weights have begun. Sizes,
times and inodes are compared, not bytes: that takes microseconds, and errs towards a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from heddle.models.weights.safetensors_header import INDEX_NAME


class Mark(NamedTuple):
    """One file, as the system describes it."""

    num_bytes: int
    mtime_ns: int
    inode: int


Marks = Mapping[Path, Mark]
"""Of the files that are there."""


def model_files(model: Path) -> list[Path]:
    """What ranks read of a model.

    Args:
        model: a folder or a `.gguf` file.
    """
    if not model.is_dir():
        return [model]
    return [model / "config.json", model / INDEX_NAME, *sorted(model.glob("*.safetensors"))]


def marks_of(paths: Iterable[Path]) -> Marks:
    """Files as they are now, those behind links; what is not there is left out."""
    found = {}
    for path in paths:
        try:
            info = path.stat()
        except OSError:
            continue
        found[path] = Mark(info.st_size, info.st_mtime_ns, info.st_ino)
    return found


def what_changed(before: Marks, now: Marks) -> str:
    """The first file that differs, and how; empty: none does.

    Args:
        before: when they were loaded.
        now: of the same places.
    """
    for path in sorted(before.keys() | now.keys()):
        old, new = before.get(path), now.get(path)
        if old == new:
            continue
        if old is None:
            return f"{path} was not there"
        if new is None:
            return f"{path} is gone"
        if old.num_bytes != new.num_bytes:
            return f"{path} has {new.num_bytes} bytes, it had {old.num_bytes}"
        return f"{path} was written or replaced"
    return ""
