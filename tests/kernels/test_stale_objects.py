"""Old object code goes, and only old object code."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from heddle.kernels import warmup
from heddle.kernels.object_cache import object_folder
from heddle.kernels.stale_objects import UNUSED_SECONDS, forget, stamp

OLD = time.time() - UNUSED_SECONDS - 3600


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "heddle" / "kernels"


def version(folder: Path, stamped: float | None = None) -> Path:
    """A folder of object code."""
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "numba_cpu._rotate-1.py311.1.nbc").touch()
    if stamped is not None:
        os.utime(folder, (stamped, stamped))
    return folder


def test_a_new_version_removes_those_that_nobody_has_used_for_long(cache: Path) -> None:
    old = [version(cache / f"rotate-{number}", OLD) for number in range(3)]
    kept = [version(cache / "rotate-9"), version(cache / "silu_mul-0", OLD)]
    stamp(["rotate"])
    assert [folder.exists() for folder in (*old, *kept)] == [False] * 3 + [True] * 2
    assert sorted(path.name for path in cache.iterdir()) == ["rotate-9", "silu_mul-0"]


def test_a_version_in_use_is_stamped_and_removes_nothing(cache: Path) -> None:
    old, used = version(cache / "rotate-0", OLD), version(object_folder("rotate"), OLD)
    stamp(["rotate"])
    assert old.exists()
    assert used.stat().st_mtime > OLD + 3600
    assert old.stat().st_mtime == pytest.approx(OLD)


def test_the_version_in_use_stays_however_old(cache: Path) -> None:
    used = version(cache / "rotate-1", OLD)
    assert forget(used) == []
    assert used.exists()


def test_of_many_that_remove_at_once_each_folder_is_removed_by_one(cache: Path) -> None:
    old = [version(cache / f"rotate-{number}", OLD) for number in range(20)]
    removed: list[Path] = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        removed.extend(forget(cache / "rotate-new"))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(removed) == sorted(old)
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_not_there_is_no_error(cache: Path) -> None:
    stamp(["rotate", "paged_decode.int8"])
    assert not cache.exists()


def test_warming_up_stamps_what_is_used(cache: Path) -> None:
    used = version(object_folder("rotate"), OLD)
    warmup.compile_elsewhere(["rotate"], pytest.fail)
    assert used.stat().st_mtime > OLD + 3600
