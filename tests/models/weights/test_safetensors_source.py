"""One file or shards with an index; damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.weights.safetensors_source import SafetensorsSource

MATRIX = torch.arange(35.0).view(5, 7)
VECTOR = torch.arange(4.0)


def write_shards(folder: Path) -> None:
    save_file({"a": MATRIX}, folder / "one.safetensors")
    save_file({"b": VECTOR}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("file", ["model.safetensors", "other.safetensors"])
def test_one_file_is_read_by_slices(tmp_path: Path, file: str) -> None:
    save_file({"a": MATRIX, "b": VECTOR.to(torch.bfloat16)}, tmp_path / file)
    source = SafetensorsSource(tmp_path)
    assert set(source.names()) == {"a", "b"}
    assert source.shape("a") == (5, 7)
    assert torch.equal(source.read("a"), MATRIX)
    assert torch.equal(source.read("a", (1, 4), (2, 6)), MATRIX[1:4, 2:6])
    assert torch.equal(source.read("a", cols=(2, 6)), MATRIX[:, 2:6])
    assert source.read("b", (1, 3)).dtype == torch.bfloat16
    assert source.location("a") == str(tmp_path / file)


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    source = SafetensorsSource(tmp_path)
    assert set(source.names()) == {"a", "b"}
    assert torch.equal(source.read("b", (1, 3)), VECTOR[1:3])
    assert source.location("b") == str(tmp_path / "two.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"two\.safetensors: is missing"):
        SafetensorsSource(tmp_path)


def test_an_index_that_promises_too_much_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"c": VECTOR}, tmp_path / "two.safetensors")
    with pytest.raises(ModelFileError, match=r"two\.safetensors: b is missing; .*index\.json"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("cut_bytes", [1, 60, 200])
def test_a_truncated_file_is_named(tmp_path: Path, cut_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": MATRIX}, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut_bytes)
    with pytest.raises(ModelFileError, match=r"model\.safetensors: is not a whole safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_with_a_conversion_hint(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"convert them with .*safe_serialization=True"):
        SafetensorsSource(tmp_path)


def test_no_files_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no \*\.safetensors file") as caught:
        SafetensorsSource(tmp_path)
    assert "convert" not in str(caught.value)


def test_several_files_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFileError, match=r"2 \*\.safetensors files and no model\.safetensors"):
        SafetensorsSource(tmp_path)


def test_a_narrow_type_is_refused(tmp_path: Path) -> None:
    save_file({"a": MATRIX.to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"a is stored as F8_E4M3; known: F64, F32"):
        SafetensorsSource(tmp_path).read("a")


def test_three_dimensions_are_cut_in_each(tmp_path: Path) -> None:
    cube = torch.arange(60.0).view(3, 4, 5)
    save_file({"a": cube}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert torch.equal(source.read("a", (1, 3), (0, 2), (2, 5)), cube[1:3, :2, 2:5])
    assert torch.equal(source.read("a", depth=(1, 2)), cube[..., 1:2])
    assert torch.equal(source.read("a", cols=(1, 2)), cube[:, 1:2])


def test_a_tensor_that_the_index_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"b": VECTOR, "c": VECTOR + 1}, tmp_path / "two.safetensors")
    with pytest.raises(ModelFileError, match=r"two\.safetensors: c is there; .*index\.json does"):
        SafetensorsSource(tmp_path)


def test_stored_forms_are_shown_to_those_who_read_them(tmp_path: Path) -> None:
    save_file({"a": MATRIX.to(torch.int32)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.stored_dtype("a") == "I32"
    assert torch.equal(source.read_stored("a", (1, 2)), MATRIX[1:2].to(torch.int32))
    with pytest.raises(UnsupportedError, match=r"a is stored as I32; .*quantization_config"):
        source.read("a")
