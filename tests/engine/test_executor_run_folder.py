"""A folder of a start is private, goes with it, and is cleared away behind a driver that died."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from heddle.engine.executors.run_folder import remove_leftovers, run_folder


@pytest.fixture(autouse=True)
def folder_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(path: Path) -> Path:
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def left_by_a_killed_driver(tmp_path: Path) -> Path:
    code = (
        "import os, signal; from heddle.engine.executors.run_folder import run_folder\n"
        "with run_folder() as folder: os.kill(os.getpid(), signal.SIGKILL)"
    )
    before = set(tmp_path.iterdir())
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert ended.returncode == -9
    (left,) = set(tmp_path.iterdir()) - before
    return left


def test_it_is_its_owners_and_goes_with_the_block(tmp_path: Path) -> None:
    with run_folder() as folder:
        assert Path(folder).parent == tmp_path
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_removes_what_a_killed_driver_left(tmp_path: Path) -> None:
    left = aged(left_by_a_killed_driver(tmp_path))
    with run_folder() as folder:
        assert [str(path) for path in tmp_path.iterdir()] == [folder]
    assert not left.exists()


def test_a_folder_whose_owner_lives_stays_however_old_it_is(tmp_path: Path) -> None:
    with run_folder() as folder:
        aged(Path(folder))
        remove_leftovers()
        assert Path(folder, "lock").exists()
        with run_folder() as other:
            assert {str(path) for path in tmp_path.iterdir()} == {folder, other}


def test_a_young_folder_may_just_not_have_its_lock_yet(tmp_path: Path) -> None:
    folder = tmp_path / "heddle-run-x"
    folder.mkdir()
    remove_leftovers()
    assert folder.exists()
    aged(folder)
    remove_leftovers()
    assert not folder.exists()


def test_what_is_no_such_folder_stays(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "file").write_text("x")
    aged(other)
    (tmp_path / "heddle-run-link").symlink_to(other)
    file = tmp_path / "heddle-run-file"
    file.write_text("x")
    aged(file)
    remove_leftovers()
    assert {path.name for path in tmp_path.iterdir()} == {
        "elsewhere",
        "heddle-run-link",
        "heddle-run-file",
    }
    assert (other / "file").exists()


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("x")
    folder = tmp_path / "heddle-run-x"
    folder.mkdir()
    (folder / "lock").symlink_to(target)
    aged(folder)
    remove_leftovers()
    assert folder.exists()
    assert target.read_text() == "x"
