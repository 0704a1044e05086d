"""Whatever is wrong with the files of a model, loading names the file, what is wrong, and the fix.

Each case damages a checkpoint that loads, and loads it as a rank does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heddle.comm.solo import SoloWorld
from heddle.config import ResolvedConfig
from heddle.errors import HeddleError, ModelFileError
from heddle.models.weights.manifest import write_manifest
from heddle.runner.worker import RankWorker
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import build_tiny

INDEX = "model.safetensors.index.json"
NAME = "model.layers.1.mlp.up_proj.weight"


def sharded(folder: Path) -> None:
    """Two shards and an index in place of one file."""
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: whole[name] for name in held}, folder / shard)
    (folder / "model.safetensors").unlink()
    places = {name: shard for shard, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def place_of(name: str, folder: Path) -> str:
    places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return places[name]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str) -> None:
    """Change the tensors of the shard that holds `name`."""
    path = folder / place_of(name, folder)
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def reindex(folder: Path, **places: str) -> None:
    found = json.loads((folder / INDEX).read_text())
    found["weight_map"] |= places
    (folder / INDEX).write_text(json.dumps(found))


def flip(path: Path, offset: int) -> None:
    body = bytearray(path.read_bytes())
    body[offset] ^= 0x55
    path.write_bytes(body)


def add_extra(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.1.extra.weight": torch.ones(3)}), NAME)
    reindex(folder, **{"model.layers.1.extra.weight": place_of(NAME, folder)})


def add_duplicate(folder: Path) -> None:
    other = "two.safetensors" if place_of(NAME, folder) == "one.safetensors" else "one.safetensors"
    tensors = {key: value.clone() for key, value in load_file(folder / other).items()}
    save_file({**tensors, NAME: load_file(folder / place_of(NAME, folder))[NAME]}, folder / other)


def lie_about_length(folder: Path) -> None:
    path = folder / "one.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def damage_payload(folder: Path) -> None:
    write_manifest(folder)
    flip(folder / "two.safetensors", -5)


def lose_shard(folder: Path) -> None:
    (folder / "two.safetensors").unlink()


def make_unreadable(folder: Path) -> None:
    """A folder in place of the file: nobody can read it, not even root."""
    (folder / "two.safetensors").unlink()
    (folder / "two.safetensors").mkdir()


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lose_shard, r"two\.safetensors: "),
    "index names an absent file": (
        lambda folder: reindex(folder, **{NAME: "three.safetensors"}),
        r"three\.safetensors: |safetensors: .* is there; ",
    ),
    "index is damaged": (
        lambda folder: (folder / INDEX).write_text('{"weight_map": '),
        r"model\.safetensors\.index\.json: ",
    ),
    "extra tensor": (add_extra, r"model\.layers\.1\.extra\.weight is not part of the configured"),
    "duplicate tensor": (add_duplicate, rf"{NAME} is there; .*index\.json does not say so"),
    "missing tensor": (
        lambda folder: rewrite(folder, lambda t: t.pop(NAME), NAME),
        rf"safetensors: {NAME} is missing; .*index\.json says it is there",
    ),
    "wrong shape": (
        lambda folder: rewrite(folder, lambda t: t.update({NAME: torch.ones(3, 5)}), NAME),
        rf"{NAME} has shape \(3, 5\); \(\d+, \d+\) was expected",
    ),
    "foreign dtype": (
        lambda folder: rewrite(folder, lambda t: t.update({NAME: t[NAME].to(torch.int32)}), NAME),
        rf"{NAME} is stored as I32; known: ",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "two.safetensors", 2000),
        r"two\.safetensors: ",
    ),
    "header lies": (lie_about_length, r"one\.safetensors: "),
    "unreadable": (make_unreadable, r"two\.safetensors: "),
    "payload damage": (damage_payload, r"two\.safetensors: its sha256 is .*fetch the file again"),
}


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(build_tiny(tmp_path, "llama-8-2"))
    sharded(folder)
    return dataclasses.replace(resolve_case(folder, Case()), kernels="torch", backend="torch")


def test_a_whole_checkpoint_loads_with_its_manifest(resolved: ResolvedConfig) -> None:
    write_manifest(Path(resolved.model_path))
    assert RankWorker(resolved, 0, SoloWorld()).model is not None


@pytest.mark.parametrize("name", CASES)
def test_damage_is_named(resolved: ResolvedConfig, name: str) -> None:
    damage, words = CASES[name]
    damage(Path(resolved.model_path))
    with pytest.raises(HeddleError, match=words) as caught:
        RankWorker(resolved, 0, SoloWorld())
    if name != "foreign dtype":  # known, and not read
        assert isinstance(caught.value, ModelFileError)


def test_there_are_twelve_kinds_of_damage() -> None:
    assert len(CASES) == 12
