from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.engine.recovery.loaded_files import marks_of, model_files, what_changed

SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", INDEX, SHARD, "model-00002-of-00002.safetensors"):
        (path / name).write_bytes(b"12345678")
    return path


def replace_alike(path: Path) -> None:
    """Another file of the same size and time."""
    info = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"87654321")
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    other.replace(path)


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"8")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "shorter": (lambda folder: (folder / SHARD).write_bytes(b"") and None, "has 0 bytes, it had 8"),
    "replaced": (lambda folder: replace_alike(folder / SHARD), "was written or replaced"),
    "written": (lambda folder: write_in_place(folder / SHARD), "was written or replaced"),
    "gone": (lambda folder: (folder / SHARD).unlink(), "is gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_not_as_it_was_is_named(folder: Path, change: str) -> None:
    act, words = CHANGES[change]
    before = marks_of(model_files(folder))
    assert len(before) == 4
    act(folder)
    assert what_changed(before, marks_of(model_files(folder))) == f"{folder / SHARD} {words}"


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_what_says_how_weights_are_read_counts_too(folder: Path, name: str) -> None:
    before = marks_of(model_files(folder))
    (folder / name).write_bytes(b"")
    assert str(folder / name) in what_changed(before, marks_of(model_files(folder)))


def test_a_shard_that_comes_is_a_change(folder: Path) -> None:
    before = marks_of(model_files(folder))
    (folder / "adapter.safetensors").write_bytes(b"")
    now = marks_of(model_files(folder))
    assert what_changed(before, now) == f"{folder / 'adapter.safetensors'} was not there"


def test_what_ranks_do_not_read_may_change(folder: Path) -> None:
    before = marks_of(model_files(folder))
    (folder / "README.md").write_text("new")
    (folder / "generation_config.json").write_text("{}")
    assert what_changed(before, marks_of(model_files(folder))) == ""


def test_a_link_that_leads_elsewhere_is_a_change(folder: Path, tmp_path: Path) -> None:
    first, second, link = tmp_path / "first.gguf", tmp_path / "second.gguf", tmp_path / "model.gguf"
    for path in (first, second):
        path.write_bytes(b"1")
        os.utime(path, ns=(5, 5))
    link.symlink_to(first)
    before = marks_of(model_files(link))
    assert what_changed(before, marks_of(model_files(link))) == ""
    link.unlink()
    link.symlink_to(second)
    assert what_changed(before, marks_of(model_files(link))) == f"{link} was written or replaced"


def test_a_model_that_is_nowhere_has_no_files(tmp_path: Path) -> None:
    assert marks_of(model_files(tmp_path / "nowhere")) == {}
