"""The files of a checkpoint, described by their headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from heddle.errors import ModelFileError
from heddle.models.weights.stored import describe_stored
from tests.support.gguf_files import write_gguf

Checkpoint = Callable[[str], Path]


def write_shards(folder: Path) -> Path:
    """Two shards and their index: 24 bytes of F32, 20 bytes of BF16."""
    first = {"a": torch.ones(2, 3)}
    second = {"b": torch.ones(5, 1, dtype=torch.bfloat16), "c": torch.ones(5, dtype=torch.bfloat16)}
    save_file(first, folder / "model-1.safetensors", metadata={"format": "pt"})
    save_file(second, folder / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_shards_are_counted_together_by_type(tmp_path: Path) -> None:
    stored = describe_stored(write_shards(tmp_path))
    assert (stored.form, stored.num_files, stored.num_tensors) == ("safetensors", 2, 3)
    assert stored.type_bytes == {"F32": 24, "BF16": 20}
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert stored.num_bytes == sum(sizes)
    assert (stored.missing_files, stored.unreadable_files) == ((), ())


def test_files_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"z": torch.ones(100)}, tmp_path / "adapter.safetensors")
    assert describe_stored(tmp_path).num_files == 2


def test_a_missing_shard_is_named_and_the_rest_described(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "model-2.safetensors").unlink()
    stored = describe_stored(tmp_path)
    assert stored.missing_files == ("model-2.safetensors",)
    assert (stored.num_files, stored.type_bytes) == (1, {"F32": 24})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\0\0",
        (1 << 60).to_bytes(8, "little"),
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x05\0\0\0\0\0\0\0{" + b'"a":',
        b"\x08\0\0\0\0\0\0\0" + b'{"a":{}}',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_a_file_without_a_header_is_named(tmp_path: Path, content: bytes) -> None:
    (write_shards(tmp_path) / "model-1.safetensors").write_bytes(content)
    stored = describe_stored(tmp_path)
    assert stored.unreadable_files == ("model-1.safetensors",)
    assert stored.num_tensors == 2


def test_a_folder_without_weights_has_no_form(tmp_path: Path) -> None:
    stored = describe_stored(tmp_path)
    assert (stored.form, stored.num_files, stored.num_bytes) == ("none", 0, 0)


def test_a_damaged_index_leaves_the_files_to_be_seen(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[")
    assert describe_stored(tmp_path).num_files == 2


def test_blocks_of_a_gguf_file_are_counted(checkpoint: Checkpoint, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "a.gguf", checkpoint("llama-8-2"), kind=kind)
    stored = describe_stored(path)
    reader = gguf.GGUFReader(path)
    expected: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name
        expected[name] = expected.get(name, 0) + int(tensor.n_bytes)
    assert stored.type_bytes == expected
    assert "Q8_0" in expected
    assert (stored.form, stored.num_files) == ("gguf", 1)
    assert (stored.num_bytes, stored.num_tensors) == (path.stat().st_size, len(reader.tensors))


def test_a_gguf_file_without_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"a\.gguf"):
        describe_stored(tmp_path / "a.gguf")
