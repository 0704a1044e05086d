"""Chooses the reader of a model's weights; those of quantised folders are dequantised."""

from __future__ import annotations

from pathlib import Path

from heddle.models.config_fields import Fields, read_json_object
from heddle.models.config_quantization import read_quantization
from heddle.models.weights.source import WeightSource


def open_weights(path: str | Path) -> WeightSource:
    """Open the weights of a model without reading them.

    Args:
        path: a folder with safetensors files, or a `.gguf` file.

    Raises:
        ModelFileError: no weights, or damaged ones.
        UnsupportedError: they are stored in a form that is not read.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from heddle.models.weights.gguf_source import GgufSource  # loaded only when chosen

        return GgufSource(path)
    return _open_folder(path)


def _open_folder(folder: Path) -> WeightSource:
    from heddle.models.weights.safetensors_source import (
        SafetensorsSource,
    )  # loaded only when chosen

    source = SafetensorsSource(folder)
    config = folder / "config.json"
    if not config.is_file():
        return source
    quantization = read_quantization(Fields(config, read_json_object(config)))
    if quantization is None:
        return source
    from heddle.models.weights.quantized import dequantize  # loaded only when chosen

    return dequantize(source, quantization)
