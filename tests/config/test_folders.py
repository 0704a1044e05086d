"""Where files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heddle.config.folders import check_cache_dir, default_cache_dir
from heddle.errors import ConfigError


def test_the_cache_folder_follows_the_desktop_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "heddle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "heddle"


@pytest.mark.parametrize("place", ["", "heddle", "heddle/kernels"])
def test_a_cache_that_others_write_to_is_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_cache_dir()
    (tmp_path / "heddle" / "kernels").mkdir(parents=True)
    check_cache_dir()
    (tmp_path / place).chmod(0o777)
    with pytest.raises(ConfigError, match="another user can write; make it yours alone") as caught:
        check_cache_dir()
    assert str(tmp_path / place) in str(caught.value)
    (tmp_path / place).chmod(0o1777)  # as /tmp: files can be added, but none put in place of ours
    if place:
        with pytest.raises(ConfigError, match="another user can write"):
            check_cache_dir()
    else:
        check_cache_dir()


def test_a_cache_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "heddle").mkdir()
    monkeypatch.setattr("heddle.config.folders.os.getuid", lambda: os.stat(tmp_path).st_uid + 1)
    if os.stat(tmp_path).st_uid:
        with pytest.raises(ConfigError, match="another user can write"):
            check_cache_dir()
    else:  # what belongs to root is trusted
        check_cache_dir()
        os.chown(tmp_path / "heddle", 65534, 65534)
        with pytest.raises(ConfigError, match="another user can write"):
            check_cache_dir()
