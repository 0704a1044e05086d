"""Weights from safetensors files: one file, or shards with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields, read_json_object
from heddle.models.sources import CONVERSION_HINT, PICKLE_SUFFIXES
from heddle.models.weights.source import Span

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsSource:
    """A `WeightSource` over the `*.safetensors` files of a folder.

    Raises:
        ModelFileError: no such files, one is damaged, or the index names what is not there.
        UnsupportedError: a tensor is stored in a narrower form than 16 bit.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files: dict[Path, Any] = {}
        self._paths = self._locate()

    def names(self) -> tuple[str, ...]:
        """All tensor names."""
        return tuple(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def location(self, name: str) -> str:
        """The shard that holds a tensor, else the index or the folder."""
        return str(self._paths.get(name, self._folder))

    def read(
        self,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        depth: Span | None = None,
    ) -> torch.Tensor:
        """A slice of a tensor, in the stored dtype; see `WeightSource.read`."""
        part = self._slice(name)
        if (dtype := part.get_dtype()) not in _DTYPES:
            raise UnsupportedError(
                f"{self._paths[name]}: {name} is stored as {dtype}; known: {', '.join(_DTYPES)}"
            )
        spans = (rows, cols, depth)
        index = [
            slice(*(span or (0, size))) for size, span in zip(part.get_shape(), spans, strict=False)
        ]
        tensor: torch.Tensor = part[tuple(index)]
        return tensor

    def _slice(self, name: str) -> Any:
        return self._open(self._paths[name]).get_slice(name)

    def _locate(self) -> dict[str, Path]:
        """The file of each tensor."""
        index = self._folder / _INDEX
        if not index.is_file():
            path = self._single_file()
            return dict.fromkeys(self._open(path).keys(), path)
        section = Fields(index, read_json_object(index)).section("weight_map")
        if section is None:
            raise ModelFileError(f"{index}: weight_map is missing; it is required")
        paths = {name: self._folder / section.text(name) for name in section}
        held = {path: frozenset(self._open(path).keys()) for path in paths.values()}
        for name, path in paths.items():
            if name not in held[path]:
                raise ModelFileError(f"{path}: {name} is missing; {index} says it is there")
        return paths

    def _single_file(self) -> Path:
        if (path := self._folder / _SINGLE).is_file():
            return path
        found = sorted(self._folder.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        what = (
            f"{len(found)} *.safetensors files and no {_INDEX}"
            if found
            else "no *.safetensors file"
        )
        has_pickles = any(any(self._folder.glob(f"*{suffix}")) for suffix in PICKLE_SUFFIXES)
        hint = f"; {CONVERSION_HINT}" if has_pickles else ""
        raise ModelFileError(f"{self._folder}: {what}; {_SINGLE} was expected{hint}")

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(str(path), framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise ModelFileError(f"{path}: is missing; the index names it") from error
            except (OSError, SafetensorError) as error:
                raise ModelFileError(
                    f"{path}: is not a whole safetensors file ({error})"
                ) from error
        return self._files[path]
