"""The reader follows from the path."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heddle.errors import ModelFileError
from heddle.models.base import RowInputs
from heddle.models.weights.dequantized import DequantizedSource
from heddle.models.weights.gguf_source import GgufSource
from heddle.models.weights.open import open_weights
from heddle.models.weights.safetensors_source import SafetensorsSource
from tests.support.checkpoints import solo_model
from tests.support.comparison import POSITIONS, TOKEN_IDS
from tests.support.gguf_files import write_gguf
from tests.support.quantized_files import fp8, write_quantized
from tests.support.tiny import DenseAttention


def test_a_folder_and_a_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen2")
    assert isinstance(open_weights(folder), SafetensorsSource)
    assert isinstance(open_weights(str(write_gguf(tmp_path / "m.gguf", folder))), GgufSource)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nothing\.gguf: cannot be read"):
        open_weights(tmp_path / "nothing.gguf")


def test_a_quantised_folder_is_dequantised(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    config, write = fp8((16, 16))
    quantised, plain = write_quantized(tmp_path, checkpoint("qwen2"), config, write, {})
    assert isinstance(open_weights(quantised), DequantizedSource)
    assert isinstance(open_weights(plain), SafetensorsSource)
    assert set(open_weights(quantised).names()) == set(open_weights(plain).names())


@pytest.mark.parametrize("name", ["llama-8-2", "llama-bias"], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_width_of_floats_loads_with_and_without_a_head_of_its_own(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    tensors = load_file(checkpoint(name) / "model.safetensors")
    is_tied = "lm_head.weight" not in tensors
    assert is_tied == (name == "llama-bias")
    rounded = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    copy = {"lm_head.weight": rounded["model.embed_tokens.weight"].clone()} if is_tied else {}
    for path, held in (
        (narrow, rounded | copy),  # some writers store a tied head all the same
        (wide, {key: tensor.float() for key, tensor in rounded.items()}),
    ):
        path.mkdir()
        shutil.copy(checkpoint(name) / "config.json", path)
        save_file(held, path / "model.safetensors")
    rows = RowInputs(TOKEN_IDS, POSITIONS, torch.full_like(POSITIONS, len(POSITIONS)))
    with torch.inference_mode():
        found, expected = (
            model.logits(model.forward(rows, DenseAttention(config)))
            for model, config in (solo_model(narrow), solo_model(wide))
        )
    assert torch.equal(found, expected)
