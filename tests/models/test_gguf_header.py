"""The header is read as written; damage is named."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import ModelFileError
from heddle.models.gguf_header import read_gguf_header

TENSOR = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("header") / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 1 << 40)
    writer.add_int64("i64", -(1 << 40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Grüße")
    writer.add_array("words", ["a", "bc", ""])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("first", TENSOR)
    writer.add_tensor("second", TENSOR.astype(np.float16)[:, :2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_every_entry_type_is_read(path: Path) -> None:
    entries = read_gguf_header(path).entries
    expected = {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 4_000_000_000,
        "i32": -70000,
        "u64": 1 << 40,
        "i64": -(1 << 40),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "Grüße",
        "words": ["a", "bc", ""],
        "numbers": [1, 2, 3],
    }
    assert {key: entries[key] for key in expected} == expected


def test_tensors_lie_where_the_header_says(path: Path) -> None:
    header = read_gguf_header(path)
    first, second = header.tensors["first"], header.tensors["second"]
    data = path.read_bytes()
    assert header.size_bytes == len(data)
    assert (first.shape, second.shape) == ((2, 3), (2, 2))
    assert (first.type_id, second.type_id) == (0, 1)
    assert data[first.offset : first.offset + 24] == TENSOR.tobytes()
    assert data[second.offset : second.offset + 8] == TENSOR.astype(np.float16)[:, :2].tobytes()


@given(st.integers(1, 400))
def test_a_file_that_ends_in_the_header_is_refused(path: Path, length: int) -> None:
    short = path.with_name("short.gguf")
    short.write_bytes(path.read_bytes()[:length])
    with pytest.raises(
        ModelFileError, match=r"short\.gguf: (is not a whole GGUF file|starts with)"
    ):
        read_gguf_header(short)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 a zip file", "starts with b'PK.*'; a GGUF file starts with b'GGUF'"),
        (b"GGUF\x01\x00\x00\x00", "GGUF version 1; versions 2 and 3"),
        (b"GGUF\x00\x00\x00\x03", "GGUF version 50331648"),  # big-endian
        (b"", "is not a whole GGUF file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        read_gguf_header(file)


def test_a_wrong_alignment_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("general.alignment", 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"general\.alignment=0"):
        read_gguf_header(tmp_path / "m.gguf")


def test_arrays_without_end_are_refused(tmp_path: Path) -> None:
    entry = struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * 50_000
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(ModelFileError, match="is not a whole GGUF file"):
        read_gguf_header(file)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    info = struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 0, 0)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + 2 * info + bytes(64))
    with pytest.raises(ModelFileError, match="two tensors have one name"):
        read_gguf_header(file)
