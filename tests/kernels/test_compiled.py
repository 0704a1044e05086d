"""An entry is compiled also where its object code cannot be kept."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core import caching

from heddle.kernels import compiled
from tests.support.processes import LONG_SECONDS, children_of, is_running, seconds_until


def test_a_full_disk_costs_time_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def save(self: Any, key: Any, data: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    compiled._say_not_kept.cache_clear()

    def nothing(address: int) -> None:
        pass

    with caplog.at_level(logging.WARNING, "heddle.kernels"):
        first, second = compiled.entry(nothing), compiled.entry(nothing)
    assert first
    assert second
    (record,) = caplog.records  # once for all entries
    assert "No space left on device" in record.getMessage()
    assert "XDG_CACHE_HOME" in record.getMessage()


def test_object_code_lies_in_the_cache_or_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Beside the sources nobody would see that what they import has changed."""
    package, cache = tmp_path / "weft", tmp_path / "cache"
    package.mkdir()
    (package / "own_weave.py").write_text("def nothing(address):\n    pass\n")
    monkeypatch.syspath_prepend(package)
    nothing = importlib.import_module("own_weave").nothing
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    cache.write_text("a file where a folder should be\n")
    compiled._say_not_kept.cache_clear()
    with caplog.at_level(logging.WARNING, "heddle.kernels"):
        assert compiled.entry(nothing)
    assert "compiled kernels cannot be kept" in caplog.text
    assert list(tmp_path.rglob("*.nb[ci]")) == []
    cache.unlink()
    assert compiled.entry(nothing)
    kept = list(tmp_path.rglob("*.nbc"))
    assert len(kept) == 1
    assert cache in kept[0].parents


def test_whoever_compiles_ends_with_the_driver(tmp_path: Any) -> None:
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from heddle.kernels.warmup import compile_elsewhere, LAYERS\n"
            "compile_elsewhere(LAYERS, lambda line: print(line, flush=True))",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert driver.stdout is not None
    assert driver.stdout.readline().startswith("compiling kernels 1/")
    (child,) = children_of(driver.pid)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    assert seconds_until(lambda: not is_running(child)) < LONG_SECONDS / 4
