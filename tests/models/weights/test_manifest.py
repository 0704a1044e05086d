"""Files that are not what somebody vouched for do not load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from heddle.errors import ModelFileError
from heddle.models.weights import manifest as module
from heddle.models.weights.manifest import check_manifest, manifest_path, write_manifest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.arange(35.0)}, folder / "one.safetensors")
    save_file({"b": torch.arange(9.0)}, folder / "two.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "notes.txt").write_text("not read by anybody")
    return folder


def check(model: Path, **options: bool) -> bool:
    return check_manifest(model, memory=model.parent / "cache" / "sums.json", **options)


def flip_last_byte(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def test_without_a_manifest_nothing_is_looked_at(model: Path) -> None:
    assert not check(model)
    assert list(model.parent.iterdir()) == [model]


def test_untouched_files_pass(model: Path) -> None:
    target = write_manifest(model)
    assert target == model / "heddle-manifest.json"
    assert set(json.loads(target.read_text())["files"]) == {
        "config.json",
        "one.safetensors",
        "two.safetensors",
    }
    assert check(model)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "payload": (
        lambda folder: flip_last_byte(folder / "two.safetensors"),
        r"two\.safetensors: its sha256 is [0-9a-f]{64}; .*fetch the file again",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "two.safetensors", 90),
        r"two\.safetensors: has 90 bytes; ",
    ),
    "missing": (
        lambda folder: (folder / "two.safetensors").unlink(),
        r"two\.safetensors is missing; ",
    ),
    "foreign": (
        lambda folder: save_file({"c": torch.ones(1)}, folder / "three.safetensors"),
        r"three\.safetensors: is there; .*does not name it",
    ),
    "settings": (
        lambda folder: (folder / "config.json").write_text("[]"),
        r"config\.json: its sha256 is ",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_by_file(model: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    write_manifest(model)
    assert check(model)
    damage(model)
    with pytest.raises(ModelFileError, match=message):
        check(model)


def test_a_sum_is_made_once_for_each_state_of_a_file(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(model)
    summed: list[str] = []
    real = module._sha256

    def counted(path: Path) -> str:
        summed.append(path.name)
        return real(path)

    monkeypatch.setattr(module, "_sha256", counted)
    check(model)
    assert sorted(summed) == ["config.json", "one.safetensors", "two.safetensors"]
    summed.clear()
    check(model)
    assert summed == []
    os.utime(model / "one.safetensors")
    check(model)
    assert summed == ["one.safetensors"]
    summed.clear()
    check(model, trusts_memory=False)
    assert len(summed) == 3


def test_a_sum_that_was_wrong_is_not_remembered(model: Path) -> None:
    write_manifest(model)
    flip_last_byte(model / "one.safetensors")
    for _ in range(2):
        with pytest.raises(ModelFileError, match=r"one\.safetensors: its sha256"):
            check(model)


def test_a_memory_that_cannot_be_kept_costs_only_time(model: Path, tmp_path: Path) -> None:
    write_manifest(model)
    (tmp_path / "file").write_text("")
    assert check_manifest(model, memory=tmp_path / "file" / "sums.json")
    (tmp_path / "torn.json").write_text("[1, ")
    assert check_manifest(model, memory=tmp_path / "torn.json")


def test_one_file_has_its_manifest_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF and more")
    assert write_manifest(path) == tmp_path / "tiny.gguf.heddle-manifest.json"
    assert check_manifest(path, memory=tmp_path / "sums.json")
    flip_last_byte(path)
    with pytest.raises(ModelFileError, match=r"tiny\.gguf: its sha256"):
        check_manifest(path, memory=tmp_path / "sums.json")


def test_a_named_manifest_takes_the_place_of_the_one_beside(model: Path, tmp_path: Path) -> None:
    named = write_manifest(model).rename(tmp_path / "kept.json")
    flip_last_byte(model / "one.safetensors")
    assert not check(model)
    with pytest.raises(ModelFileError, match=r"one\.safetensors: .*kept\.json says"):
        check_manifest(model, named, memory=tmp_path / "sums.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "files": {}}', '{"format": 1, "files": {"a": 3}}']
)
def test_a_damaged_manifest_is_no_manifest(model: Path, text: str) -> None:
    manifest_path(model).write_text(text)
    with pytest.raises(ModelFileError, match=r"heddle-manifest\.json: is no manifest"):
        check(model)


def test_a_manifest_of_nothing_is_refused(model: Path) -> None:
    manifest_path(model).write_text('{"format": 1, "files": {}}')
    with pytest.raises(ModelFileError, match="names no files"):
        check(model)


def test_a_folder_without_weights_gets_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="no weights to sum up"):
        write_manifest(tmp_path)
