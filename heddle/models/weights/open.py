"""Chooses the reader of a model's weights."""

from __future__ import annotations

from pathlib import Path

from heddle.models.weights.source import WeightSource


def open_weights(path: str | Path) -> WeightSource:
    """Open the weights of a model without reading them.

    Args:
        path: a folder with safetensors files, or a `.gguf` file.

    Raises:
        ModelFileError: no weights, or damaged ones.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from heddle.models.weights.gguf_source import GgufSource  # loaded only when chosen

        return GgufSource(path)
    from heddle.models.weights.safetensors_source import (
        SafetensorsSource,
    )  # loaded only when chosen

    return SafetensorsSource(path)
