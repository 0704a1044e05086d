"""Every stored form gives the library's numbers, in whatever slices it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.base import RowInputs
from heddle.models.weights.gguf_source import GgufSource
from heddle.models.weights.safetensors_source import SafetensorsSource
from tests.support.checkpoints import solo_model
from tests.support.comparison import POSITIONS, TOKEN_IDS
from tests.support.gguf_files import Kind, write_gguf, write_matrix
from tests.support.tiny import DenseAttention

Checkpoint = Callable[[str], Path]

NAME = "model.layers.0.mlp.down_proj.weight"
WRITABLE = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
# The library reads these but writes none of them: any bytes are a legal block, scales aside.
READ_ONLY = (
    Kind.Q2_K,
    Kind.Q3_K,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.IQ4_NL,
    Kind.IQ4_XS,
)
ROWS, COLS = 10, 512


def stored_matrix(kind: Kind) -> np.ndarray:
    rng = np.random.default_rng(7)
    if kind in WRITABLE:
        return gguf.quantize(rng.normal(size=(ROWS, COLS)).astype(np.float32), kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x3c keep every half-precision scale finite, wherever it lies in the block.
    return rng.integers(0, 0x3C, size=(ROWS, COLS // block * block_bytes), dtype=np.uint8)


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, tuple[GgufSource, np.ndarray]]:
    folder = tmp_path_factory.mktemp("gguf")
    found = {}
    for kind in WRITABLE + READ_ONLY:
        stored = stored_matrix(kind)
        path = write_matrix(folder / f"{kind.name}.gguf", stored, kind)
        found[kind] = (GgufSource(path), gguf.dequantize(stored, kind))
    return found


@pytest.mark.parametrize("kind", WRITABLE + READ_ONLY, ids=lambda kind: kind.name)
@given(data=st.data())
def test_any_slice_equals_the_slice_of_the_whole(
    matrices: dict[Kind, tuple[GgufSource, np.ndarray]], kind: Kind, data: st.DataObject
) -> None:
    source, whole = matrices[kind]
    assert np.isfinite(whole).all()
    assert np.unique(whole).size > 4
    assert source.shape(NAME) == (ROWS, COLS)
    start, end = sorted(data.draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS))))
    left, right = sorted(data.draw(st.tuples(st.integers(0, COLS), st.integers(0, COLS))))
    part = source.read(NAME, (start, end), (left, right))
    assert part.dtype == torch.float32
    assert np.array_equal(part.numpy(), whole[start:end, left:right])
    assert np.array_equal(source.read(NAME, (start, end)).numpy(), whole[start:end])


@pytest.mark.parametrize(
    "name", ["llama-9-3", "llama-8-1", "llama-bias", "qwen2", "qwen3", "granite", "olmo2"]
)
def test_a_converted_checkpoint_reads_like_the_original(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    """Names, shapes, and the rotary order of query and key rows, bit for bit."""
    original = SafetensorsSource(checkpoint(name))
    converted = GgufSource(write_gguf(tmp_path / "m.gguf", checkpoint(name)))
    assert set(converted.names()) == set(original.names())
    for tensor in original.names():
        assert converted.shape(tensor) == original.shape(tensor)
        assert torch.equal(converted.read(tensor), original.read(tensor)), tensor


@given(st.tuples(st.integers(0, 72), st.integers(0, 72)))
def test_rotary_rows_may_be_cut_anywhere(
    paired: tuple[SafetensorsSource, GgufSource], cut: tuple[int, int]
) -> None:
    original, converted = paired
    start, end = sorted(cut)
    name = "model.layers.1.self_attn.q_proj.weight"
    expected = original.read(name, (start, end), (3, 50))
    assert torch.equal(converted.read(name, (start, end), (3, 50)), expected)


@pytest.fixture(scope="module")
def paired(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SafetensorsSource, GgufSource]:
    path = checkpoint("llama-9-3")
    file = write_gguf(tmp_path_factory.mktemp("paired") / "m.gguf", path)
    return SafetensorsSource(path), GgufSource(file)


@pytest.mark.parametrize("name", ["llama-6-2", "qwen3", "granite", "olmo2"])
def test_a_converted_model_gives_the_same_logits(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    original = solo_model(checkpoint(name))
    converted = solo_model(write_gguf(tmp_path / "m.gguf", checkpoint(name)))
    with torch.inference_mode():
        expected, found = (
            model.logits(model.forward(RowInputs(TOKEN_IDS, POSITIONS), DenseAttention(config)))
            for model, config in (original, converted)
        )
    # The file holds eps as float32, hence not bit for bit.
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_truncated_file_names_file_tensor_and_bytes(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen2"))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(ModelFileError, match=r"m\.gguf: is truncated; [\w.]+ needs \d+ bytes"):
        GgufSource(path)


def test_a_form_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = write_matrix(tmp_path / "m.gguf", np.zeros((2, 4), dtype=np.int32), Kind.I32)
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_down\.weight is stored as I32.*Q4_1"):
        GgufSource(path)


def test_a_tensor_of_more_than_two_dimensions_is_refused(tmp_path: Path) -> None:
    stored = np.zeros((2, 3, 4), dtype=np.float32)
    path = write_matrix(tmp_path / "m.gguf", stored, Kind.F32)
    with pytest.raises(UnsupportedError, match=r"shape \(2, 3, 4\)"):
        GgufSource(path)


def test_an_unknown_tensor_keeps_its_name(tmp_path: Path, checkpoint: Checkpoint) -> None:
    extra = {"blk.0.mystery.weight": np.ones(3, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen2"), extra_tensors=extra)
    source = GgufSource(path)
    assert "blk.0.mystery.weight" in source.names()
    assert source.read("blk.0.mystery.weight").tolist() == [1, 1, 1]
    with pytest.raises(ModelFileError, match=r"blk\.0\.mystery\.weight is not part"):
        solo_model(path)


def test_a_tensor_under_both_of_its_names_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    extra = {"model.norm.weight": np.ones(64, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", checkpoint("llama-8-2"), extra_tensors=extra)
    with pytest.raises(ModelFileError, match=r"are one tensor"):
        GgufSource(path)
