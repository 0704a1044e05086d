"""A name becomes files; local ones without the network, hub ones through the hub library."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from heddle.errors import ModelFileError
from heddle.models.sources import resolve_model_path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.mark.usefixtures("no_network")
def test_a_folder_that_is_closed_to_us_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it cannot be asked; whether it is there can."""
    real = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if tmp_path in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ModelFileError, match=r"cannot be looked for .*Permission denied"):
        resolve_model_path(str(tmp_path))


@pytest.mark.usefixtures("no_network")
def test_local_paths_are_used_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "one.gguf").write_bytes(b"")
    assert resolve_model_path(str(tmp_path)) == tmp_path
    assert resolve_model_path(str(tmp_path / "one.gguf")) == tmp_path / "one.gguf"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"")
    assert resolve_model_path(str(tmp_path)) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"one\.gguf, two\.gguf; name one"):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_with_a_conversion_hint(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"convert them with .*safe_serialization=True"):
        resolve_model_path(str(tmp_path / file))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "nowhere.gguf", "a/b.gguf", "word"]
)
def test_what_is_neither_path_nor_hub_id_is_refused_at_once(name: str) -> None:
    with pytest.raises(ModelFileError, match=r"is not found; legal: demo, .*owner/name"):
        resolve_model_path(name)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["~no-such-user-here/model", "x" * 300 + "/" + "y" * 300])
def test_a_path_that_cannot_be_looked_for_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelFileError, match=r"^model='.*(cannot be looked for|is neither a path)"):
        resolve_model_path(name)


def test_a_hub_id_is_fetched_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[tuple[str, object, object]] = []

    def fetch(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options["revision"], options["cache_dir"]))
        patterns = options["allow_patterns"]
        assert isinstance(patterns, list)
        assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    found = resolve_model_path("owner/name", revision="v2", download_dir=Path("/downloads"))
    assert found == tmp_path
    assert asked == [("owner/name", "v2", Path("/downloads"))]


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("offline"), OSError("no route"), ValueError("bad id")]
)
def test_a_failed_fetch_names_the_model_and_the_cause(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(repo_id: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ModelFileError, match=rf"'owner/name' at revision r1 .*{error}"):
        resolve_model_path("owner/name", revision="r1")


def test_offline_by_the_hub_librarys_own_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFileError, match=r"'owner/name' is neither a path here nor could it"):
        resolve_model_path("owner/name", download_dir=tmp_path)
