"""Where files are kept between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.config.folders import default_cache_dir


def test_the_cache_folder_follows_the_desktop_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "heddle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "heddle"
