"""Only what is being read counts as memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from heddle.models.weights.mapped_file import MappedFile
from tests.support.load_peak import mapped_bytes

SIZE = 64 * mmap.PAGESIZE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


def test_a_use_drops_the_pages_of_the_one_before(path: Path) -> None:
    file = MappedFile(path)
    file.use(0, SIZE // 2)
    held = file.buffer[: SIZE // 2]
    # A system may map neighbours of a touched page, too, so what is dropped is counted.
    before = mapped_bytes(path)
    assert before >= SIZE // 2
    file.use(SIZE // 2, SIZE // 2)
    assert mapped_bytes(path) <= before - SIZE // 2
    assert file.buffer[: SIZE // 2] == held


def test_a_prefetch_changes_nothing_that_is_read(path: Path) -> None:
    file = MappedFile(path)
    file.prefetch(mmap.PAGESIZE + 5, 3 * mmap.PAGESIZE)
    file.prefetch(7, 7)
    assert file.buffer[mmap.PAGESIZE + 5] == 5


def test_a_missing_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        MappedFile(tmp_path / "nothing")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        MappedFile(tmp_path / "empty")
