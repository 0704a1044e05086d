"""Damaged files of weights: refused in words, or read; no crash, no hang, no huge allocation."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from heddle.engine.tokenizer import load_tokenizer
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_gguf import read_gguf_config
from heddle.models.gguf_header import read_gguf_header
from heddle.models.weights.gguf_source import GgufSource
from heddle.models.weights.manifest import check_manifest, write_manifest
from heddle.models.weights.safetensors_header import INDEX_NAME, read_header
from heddle.models.weights.safetensors_source import SafetensorsSource
from heddle.models.weights.stored import describe_stored
from tests.support.gguf_files import write_gguf
from tests.support.mutations import mutated_bytes, mutated_json, try_mutants
from tests.support.tiny import build_tiny

FEW, MANY = 150, 10_000
TIERS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
HEADROOM_BYTES = 8 << 20
"""Beside what is proportional to the file: modules, messages, the tokenizer."""
BYTES_PER_BYTE = 100
"""Most that Python keeps for a byte of a header: an empty list has 64, and 12 in the file."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), "llama-8-2")


def first_data(path: Path) -> int:
    """Where the header of a GGUF file ends."""
    return min(tensor.offset for tensor in read_gguf_header(path).tensors.values())


@pytest.mark.parametrize("count", TIERS)
def test_mutated_gguf_headers_are_refused_or_read(
    checkpoint: Path, tmp_path: Path, count: int
) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", checkpoint)
    good, end = whole.read_bytes(), first_data(whole)
    mutant = tmp_path / "mutant.gguf"

    def attempt(seed: int) -> None:
        mutant.write_bytes(mutated_bytes(good, seed, end))
        describe_stored(mutant)
        read_gguf_config(mutant)
        source = GgufSource(mutant)
        for name in source.names():
            assert source.read(name).shape == source.shape(name)

    found = try_mutants(range(count), attempt)
    assert found.num_refused > count // 2
    assert found.num_taken > count // 100, "some mutants are harmless"
    assert found.peak_bytes < HEADROOM_BYTES + BYTES_PER_BYTE * end + 8 * len(good)


@pytest.mark.parametrize("count", [FEW])
def test_mutated_tokenizers_in_gguf_headers_are_refused_or_read(
    checkpoint: Path, tmp_path: Path, count: int
) -> None:
    whole = write_gguf(
        tmp_path / "whole.gguf", checkpoint, extra_fields={"tokenizer.ggml.model": "gpt2"}
    )
    good, end = whole.read_bytes(), first_data(whole)
    mutant = tmp_path / "mutant.gguf"

    def attempt(seed: int) -> None:
        mutant.write_bytes(mutated_bytes(good, seed, end))
        load_tokenizer(str(mutant))

    assert try_mutants(range(count), attempt).num_refused == count  # it has no merges at all


@pytest.mark.parametrize(
    ("kind", "length"), [(0, 2**61), (8, 2**62), (9, 2**63), (12, 2**61 - 1), (10, 2**32)]
)
def test_an_array_of_a_length_that_no_file_has_takes_no_memory(
    tmp_path: Path, kind: int, length: int
) -> None:
    entry = struct.pack("<Q1sIIQ", 1, b"a", 9, kind, length)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(64))

    def attempt(seed: int) -> None:
        read_gguf_header(file)

    found = try_mutants([0], attempt)
    assert found.num_refused == 1
    assert found.peak_bytes < 1 << 20


def gguf_of(tmp_path: Path, *tensors: tuple[bytes, tuple[int, ...], int], data: int = 64) -> Path:
    """A file with float32 tensors `(name, dims, offset)` and so many bytes of data."""
    infos = b"".join(
        struct.pack(f"<Q{len(name)}sI{len(dims)}QIQ", len(name), name, len(dims), *dims, 0, offset)
        for name, dims, offset in tensors
    )
    entry = struct.pack("<Q20sIQ5s", 20, b"general.architecture", 8, 5, b"qwen3")
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1) + entry + infos
    file = tmp_path / "m.gguf"
    file.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return file


def test_tensors_of_a_gguf_file_that_share_bytes_are_named(tmp_path: Path) -> None:
    GgufSource(gguf_of(tmp_path, (b"a", (8,), 0), (b"b", (8,), 32)))
    with pytest.raises(ModelFileError, match="a and b overlap in the file"):
        GgufSource(gguf_of(tmp_path, (b"a", (8,), 0), (b"b", (8,), 28)))


def test_a_product_of_dimensions_beyond_64_bits_is_a_file_too_short(tmp_path: Path) -> None:
    # 2**62 numbers of 4 bytes: zero bytes where 64 bits hold the product.
    with pytest.raises(ModelFileError, match=f"a needs {2**64} bytes"):
        GgufSource(gguf_of(tmp_path, (b"a", (2**31, 2**31), 0)))


@pytest.mark.parametrize("dims", [(), (0,), (0, 8), (8, 0), (2**62, 0), (2, 2, 2)])
def test_a_tensor_without_numbers_or_with_many_dimensions_is_refused(
    tmp_path: Path, dims: tuple[int, ...]
) -> None:
    with pytest.raises(UnsupportedError, match="a has shape"):
        GgufSource(gguf_of(tmp_path, (b"a", dims, 0)))


def test_a_key_twice_in_a_gguf_header_is_refused(tmp_path: Path) -> None:
    entry = struct.pack("<Q1sIB", 1, b"a", 0, 1)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * entry)
    with pytest.raises(ModelFileError, match="two entries have the key 'a'"):
        read_gguf_header(file)


TENSORS = {
    "a": torch.ones(4, 6),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.ones(2, 2, 2, dtype=torch.float16),
}


def split_header(path: Path) -> tuple[dict[str, object], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("count", TIERS)
def test_mutated_safetensors_headers_are_refused_or_read(tmp_path: Path, count: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, {"format": "pt", "note": "of no use" * 9})
    good, (header, data) = path.read_bytes(), split_header(path)

    def attempt(seed: int) -> None:
        content = (
            mutated_bytes(good, seed, len(good) - len(data))
            if seed % 2
            else joined(mutated_json(header, seed), data)
        )
        path.write_bytes(content)
        describe_stored(tmp_path)
        read_header(path)
        source = SafetensorsSource(tmp_path)
        for name in source.names():
            source.prefetch(name)
            assert source.read(name).shape == source.shape(name)

    found = try_mutants(range(count), attempt)
    assert found.num_refused > count // 2
    assert found.num_taken > 0, "some mutants are harmless"
    assert found.peak_bytes < HEADROOM_BYTES


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [2**24, 2**24], "data_offsets": [0, 0]}, "0 bytes for shape"),
        ({"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}, "shape="),
        ({"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 20]}, "20 bytes for shape"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "data_offsets=\\[4, 0\\]"),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, "shape=\\[-1, -1\\]"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "shape=\\[True\\]"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "shape=\\[1.0\\]"),
        ({"dtype": "F32", "shape": [2**40] * 2 + [0], "data_offsets": [0, 0]}, "shape="),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "dtype="),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, float("inf")]}, "data_offsets="),
        ({"dtype": "F32", "shape": [1], "data_offsets": {"0": 4}}, "data_offsets="),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
        (None, "a tensor is None"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    tmp_path: Path, entry: object, reason: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(joined({"a": entry}, bytes(64)))
    with pytest.raises(ModelFileError, match=reason):
        read_header(path)


def test_tensors_of_a_safetensors_file_that_share_bytes_are_refused(tmp_path: Path) -> None:
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    other = {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
    (tmp_path / "model.safetensors").write_bytes(joined({"a": one, "b": other}, bytes(12)))
    with pytest.raises(ModelFileError, match="is not a whole safetensors file"):
        SafetensorsSource(tmp_path)


def test_mutated_indices_are_refused_or_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4, 6)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(4, 6)}, tmp_path / "two.safetensors")
    good = {
        "metadata": {"total_size": 192},
        "weight_map": {"a": "one.safetensors", "b": "two.safetensors"},
    }
    text = json.dumps(good).encode()

    def attempt(seed: int) -> None:
        damaged = mutated_bytes(text, seed) if seed % 3 == 0 else None
        content = damaged or json.dumps(mutated_json(good, seed)).encode()
        (tmp_path / INDEX_NAME).write_bytes(content)
        describe_stored(tmp_path)
        source = SafetensorsSource(tmp_path)
        for name in source.names():  # an index may well say less
            assert source.read(name).shape == (4, 6)

    found = try_mutants(range(2 * FEW), attempt, (ModelFileError,))
    assert found.num_refused > FEW // 2
    assert found.num_taken > FEW // 10


def test_mutated_manifests_are_refused_or_hold(tmp_path: Path) -> None:
    model, memory = tmp_path / "model", tmp_path / "memory"
    model.mkdir()
    save_file({"a": torch.ones(4, 6)}, model / "model.safetensors")
    path = write_manifest(model)
    good = json.loads(path.read_text())
    text = json.dumps(good).encode()

    def attempt(seed: int) -> None:
        damaged = mutated_bytes(text, seed) if seed % 2 else None
        path.write_bytes(damaged or json.dumps(mutated_json(good, seed)).encode())
        assert check_manifest(model, memory=memory)

    assert check_manifest(model, memory=memory)
    found = try_mutants(range(FEW), attempt, (ModelFileError,))
    assert found.num_refused > FEW // 2
    assert found.num_taken > 0, "some mutants are harmless"
    memory.write_text('{"a": [' * 9000)
    path.write_bytes(text)
    assert check_manifest(model, memory=memory)


@pytest.mark.parametrize("name", ["../one.safetensors", "sub/one.safetensors", "{0}/x", "..", ""])
def test_an_index_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        save_file({"a": torch.ones(4)}, place / "one.safetensors")
    index = {"weight_map": {"a": name.format(tmp_path)}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"file of this folder was expected|is not a file"):
        SafetensorsSource(folder)


def open_gguf(folder: Path) -> object:
    return GgufSource(folder / "weights")


def open_folder(folder: Path) -> object:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "weights"}}))
    return SafetensorsSource(folder)


def open_header(folder: Path) -> object:
    return read_header(folder / "weights")


@pytest.mark.parametrize("open_it", [open_gguf, open_folder, open_header])
def test_a_pipe_in_the_place_of_weights_is_not_waited_for(
    tmp_path: Path, open_it: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "weights")
    with pytest.raises(ModelFileError, match="is not a file"):
        open_it(tmp_path)
