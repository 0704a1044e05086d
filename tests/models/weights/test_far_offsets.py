"""Tensors behind the first 4 GiB of a file; the files are holes, so they take no room."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from heddle.models.weights.gguf_source import GgufSource
from heddle.models.weights.safetensors_file import SafetensorsFile

FAR = (1 << 32) + (1 << 20)
"""Bytes of a tensor that nobody reads, but for its last row."""
VALUES = (1.5, -2.0, 3.25, 4.0)


def with_holes(path: Path, head: bytes, tail: bytes) -> Path:
    """A file of `head`, a hole of `FAR` bytes, and `tail`."""
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + FAR)
        file.write(tail)
    assert path.stat().st_size > 1 << 32
    assert path.stat().st_blocks * 512 < 1 << 20
    return path


def test_a_safetensors_file_is_read_beyond_4_gib(tmp_path: Path) -> None:
    tail = struct.pack("<4f", *VALUES)
    entries = {
        "hole": {"dtype": "F32", "shape": [FAR // 16, 4], "data_offsets": [0, FAR]},
        "last": {"dtype": "F32", "shape": [2, 2], "data_offsets": [FAR, FAR + 16]},
    }
    header = json.dumps(entries).encode()
    path = with_holes(tmp_path / "far.safetensors", struct.pack("<Q", len(header)) + header, tail)
    file = SafetensorsFile(path)
    assert file.read("last", (1, 2)).tolist() == [list(VALUES[2:])]
    end = FAR // 16
    assert torch.equal(file.read("hole", (end - 1, end)), torch.zeros(1, 4))


@pytest.mark.parametrize("rows", [(0, 1), (1, 2)])
def test_a_gguf_file_is_read_beyond_4_gib(tmp_path: Path, rows: tuple[int, int]) -> None:
    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    def tensor(name: str, shape: tuple[int, int], offset: int) -> bytes:
        return text(name) + struct.pack("<I2QIQ", 2, shape[1], shape[0], 0, offset)

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama2")
    head += tensor("hole", (FAR // 16, 4), 0) + tensor("last", (2, 2), FAR)
    head += bytes(-len(head) % 32)
    source = GgufSource(with_holes(tmp_path / "far.gguf", head, struct.pack("<4f", *VALUES)))
    first = 2 * rows[0]
    assert source.read("last", rows).tolist() == [list(VALUES[first : first + 2])]
    end = FAR // 16
    assert torch.equal(source.read("hole", (end - 1, end)), torch.zeros(1, 4))
