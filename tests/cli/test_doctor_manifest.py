"""`heddle doctor MODEL --manifest` writes what every later load compares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heddle import LLM
from heddle.cli.main import main
from heddle.errors import ModelFileError
from tests.support.tiny import build_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return build_tiny(tmp_path, "llama-8-2")


def load(folder: Path, **settings: object) -> None:
    with LLM(str(folder), kernels="torch", num_threads=1, num_gpu_blocks_override=9, **settings):
        pass


def test_a_damaged_file_does_not_load_any_more(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--manifest", str(folder)]) == 0
    assert f"sums are in {folder / 'heddle-manifest.json'}" in capsys.readouterr().out
    load(folder)
    path = folder / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[-3] ^= 1
    path.write_bytes(body)
    with pytest.raises(ModelFileError, match=r"model\.safetensors: its sha256 is .*rank0"):
        load(folder)


def test_a_manifest_may_be_kept_elsewhere(folder: Path, tmp_path: Path) -> None:
    assert main(["doctor", "--json", "--manifest", str(folder)]) == 0
    kept = (folder / "heddle-manifest.json").rename(tmp_path / "kept.json")
    load(folder, weights_manifest=str(kept))
    document = json.loads(kept.read_text())
    document["files"]["model.safetensors"]["sha256"] = "0" * 64
    kept.write_text(json.dumps(document))
    load(folder)
    with pytest.raises(ModelFileError, match=r"model\.safetensors: .*kept\.json says 0000"):
        load(folder, weights_manifest=str(kept))


def test_a_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--manifest"]) == 2
    assert "--manifest sums up the files of a MODEL, and none is named" in capsys.readouterr().err
