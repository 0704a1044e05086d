"""Where files are kept between runs."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path
from typing import Any

import pytest

from heddle.config import folders
from heddle.config.folders import check_cache_dir, default_cache_dir, other_writers
from heddle.errors import ConfigError


def test_the_cache_folder_follows_the_desktop_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "heddle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "heddle"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"^user \d+ has no home .*; set XDG_CACHE_HOME to"):
        default_cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert default_cache_dir() == Path("/there/heddle")


def of_a_shared_group(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a folder belong to a group that others are in; what is its own is told as it is."""
    real = os.stat

    def stat_of(asked: Any, **options: Any) -> os.stat_result:
        found = real(asked, **options)
        if os.fspath(asked) != str(path):
            return found
        words = list(found)
        words[stat.ST_GID] = 54321
        return os.stat_result(words)

    monkeypatch.setattr(os, "stat", stat_of)
    monkeypatch.setattr(Path, "stat", lambda asked, **options: stat_of(asked, **options))


@pytest.mark.parametrize("place", ["", "heddle", "heddle/kernels"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o775, 0o720])
def test_a_cache_that_others_write_to_is_refused(
    mode: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_cache_dir()
    (tmp_path / "heddle" / "kernels").mkdir(parents=True)
    of_a_shared_group(tmp_path / place, monkeypatch)
    check_cache_dir()
    (tmp_path / place).chmod(mode)
    with pytest.raises(ConfigError, match=r"another user.* can write there, and only you may"):
        check_cache_dir()
    with pytest.raises(ConfigError, match=rf"{tmp_path / place}, whose mode is {mode:04o}: .*go-w"):
        check_cache_dir()
    (tmp_path / place).chmod(mode & ~0o022)  # as it says
    check_cache_dir()
    (tmp_path / place).chmod(0o1000 | mode)  # as /tmp: none is put in place of ours
    if place:
        with pytest.raises(ConfigError, match="another user"):
            check_cache_dir()
    else:
        check_cache_dir()


def looks(mode: int, group: int) -> os.stat_result:
    return os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, os.getuid(), group, 0, 0, 0, 0))


def test_a_group_without_anybody_else_is_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    name = pwd.getpwuid(os.getuid()).pw_name
    members: dict[int, tuple[str, list[str]]] = {
        7: (name, []),
        8: (name, [name]),
        9: (name, [name, "bea"]),
        10: ("weavers", []),
    }

    def group_of(number: int) -> grp.struct_group:
        if number not in members:
            raise KeyError(number)
        return grp.struct_group((members[number][0], "x", number, members[number][1]))

    monkeypatch.setattr(folders.grp, "getgrgid", group_of)
    found = {group: other_writers(looks(0o775, group)) for group in (0, 7, 8, 9, 10, 11)}
    assert [group for group, words in found.items() if not words] == [0, 7, 8]
    assert found[10] == "another user, of group weavers,"
    assert found[11] == "another user, of group 11,"
    assert other_writers(looks(0o755, 10)) == ""
    assert other_writers(looks(0o702, 7)) == "another user"


def test_a_cache_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "heddle").mkdir()
    monkeypatch.setattr("heddle.config.folders.os.getuid", lambda: os.stat(tmp_path).st_uid + 1)
    if os.stat(tmp_path).st_uid:
        with pytest.raises(ConfigError, match=r"belongs to user .* XDG_CACHE_HOME"):
            check_cache_dir()
    else:  # what belongs to root is trusted
        check_cache_dir()
        os.chown(tmp_path / "heddle", 65534, 65534)
        with pytest.raises(ConfigError, match=r"belongs to user .* XDG_CACHE_HOME"):
            check_cache_dir()
