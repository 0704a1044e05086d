"""The reader follows from the path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.errors import ModelFileError
from heddle.models.weights.gguf_source import GgufSource
from heddle.models.weights.open import open_weights
from heddle.models.weights.safetensors_source import SafetensorsSource
from tests.support.gguf_files import write_gguf


def test_a_folder_and_a_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen2")
    assert isinstance(open_weights(folder), SafetensorsSource)
    assert isinstance(open_weights(str(write_gguf(tmp_path / "m.gguf", folder))), GgufSource)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nothing\.gguf: cannot be read"):
        open_weights(tmp_path / "nothing.gguf")
