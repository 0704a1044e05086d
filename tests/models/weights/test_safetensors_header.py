"""Where the tensors of a file lie, read without the library; a damaged header is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from heddle.errors import ModelFileError
from heddle.models.weights.safetensors_header import read_header


def test_the_extent_of_each_tensor_holds_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(6, dtype=torch.int32).view(2, 3), "b": torch.ones(5)}
    save_file(tensors, path, metadata={"format": "pt"})
    header, data = read_header(path), path.read_bytes()
    assert {name: (info.dtype, info.shape) for name, info in header.items()} == {
        "a": ("I32", (2, 3)),
        "b": ("F32", (5,)),
    }
    for name, tensor in tensors.items():
        info = header[name]
        assert data[info.offset : info.offset + info.num_bytes] == tensor.numpy().tobytes()


def test_a_file_without_a_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little"))
    with pytest.raises(
        ModelFileError, match=r"a\.safetensors: has no header .*1152921504606846976"
    ):
        read_header(path)
    with pytest.raises(ModelFileError, match=r"b\.safetensors: has no header"):
        read_header(tmp_path / "b.safetensors")
