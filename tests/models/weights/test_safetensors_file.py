"""Views of any dtype, cut in any dimension."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from heddle.errors import ModelFileError
from heddle.models.weights.safetensors_file import SafetensorsFile

TENSORS = {
    "bytes": torch.arange(120, dtype=torch.uint8).view(2, 3, 4, 5),
    "odd": torch.arange(7, dtype=torch.int8),  # what follows lies at an odd byte
    "words": torch.arange(6, dtype=torch.int32).view(2, 3),
    "floats": torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 3),
}


@pytest.fixture
def file(tmp_path: Path) -> SafetensorsFile:
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"format": "pt"})
    return SafetensorsFile(tmp_path / "a.safetensors")


def test_every_tensor_is_read_as_it_was_written(file: SafetensorsFile) -> None:
    assert set(file.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        found = file.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found.to(torch.float64), tensor.to(torch.float64)), name
    assert file.tensors["floats"].dtype == "F8_E4M3"


def test_slices_of_four_dimensions(file: SafetensorsFile) -> None:
    found = file.read("bytes", (1, 2), None, (1, 3))
    assert torch.equal(found, TENSORS["bytes"][1:2, :, 1:3])
    file.prefetch("bytes", (1, 2))
    assert torch.equal(file.read("words", (1, 2)), TENSORS["words"][1:])
    assert found.shape == (1, 3, 2, 5)  # a view outlives the next one
    assert torch.equal(found, TENSORS["bytes"][1:2, :, 1:3])


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"b\.safetensors: is missing"):
        SafetensorsFile(tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelFileError, match=r"c\.safetensors: is not a whole safetensors file"):
        SafetensorsFile(tmp_path / "c.safetensors")


def test_a_file_that_may_not_be_read_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    path = tmp_path / "model.safetensors"
    path.touch()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match=r"model\.safetensors: cannot be read \(Permission"):
        SafetensorsFile(path)
