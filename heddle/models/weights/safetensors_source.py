"""Weights from safetensors files: one file, or shards with an index."""

from __future__ import annotations

from pathlib import Path

import torch

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields, read_json_object
from heddle.models.sources import CONVERSION_HINT, PICKLE_SUFFIXES
from heddle.models.weights.safetensors_file import SafetensorsFile
from heddle.models.weights.safetensors_header import INDEX_NAME
from heddle.models.weights.source import Span

_SINGLE = "model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")
_QUANTISED = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")


class SafetensorsSource:
    """A `WeightSource` over the `*.safetensors` files of a folder.

    Raises:
        ModelFileError: no such files, one is damaged, or the index names what is not there.
        UnsupportedError: a tensor is read that is stored in another form than floats of 16 bits or
            more.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files: dict[Path, SafetensorsFile] = {}
        self._paths = self._locate()

    def names(self) -> tuple[str, ...]:
        """All tensor names."""
        return tuple(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return self._file(name).tensors[name].shape

    def stored_dtype(self, name: str) -> str:
        """The dtype of a tensor, as the format spells it: F32, BF16, F8_E4M3, I32, ..."""
        return self._file(name).tensors[name].dtype

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
        dtype = self.stored_dtype(name)
        if dtype not in _DTYPES:
            hint = (
                "; config.json must say in quantization_config how it is quantised"
                if dtype in _QUANTISED
                else ""
            )
            raise UnsupportedError(
                f"{self._paths[name]}: {name} is stored as {dtype}; "
                f"known: {', '.join(_DTYPES)}{hint}"
            )
        spans = (rows, cols, depth)[: len(self.shape(name))]
        return self.read_stored(name, *spans)

    def read_stored(self, name: str, *spans: Span | None) -> torch.Tensor:
        """As `read`, of any dtype and any number of dimensions."""
        return self._file(name).read(name, *spans)

    def prefetch(self, name: str, rows: Span | None = None) -> None:
        """Start reading rows from disk, in the background."""
        self._file(name).prefetch(name, rows)

    def _file(self, name: str) -> SafetensorsFile:
        return self._open(self._paths[name])

    def _locate(self) -> dict[str, Path]:
        """The file of each tensor."""
        index = self._folder / INDEX_NAME
        if not index.is_file():
            path = self._single_file()
            return dict.fromkeys(self._open(path).tensors, path)
        section = Fields(index, read_json_object(index)).section("weight_map")
        if section is None:
            raise ModelFileError(f"{index}: weight_map is missing; it is required")
        paths = {name: self._folder / section.file_name(name) for name in section}
        files = {path: self._open(path) for path in paths.values()}
        for name, path in paths.items():
            if name not in files[path].tensors:
                raise ModelFileError(f"{path}: {name} is missing; {index} says it is there")
        for path, file in files.items():
            for name in file.tensors:
                if paths.get(name) != path:
                    raise ModelFileError(f"{path}: {name} is there; {index} does not say so")
        return paths

    def _single_file(self) -> Path:
        if (path := self._folder / _SINGLE).is_file():
            return path
        found = sorted(self._folder.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        what = (
            f"{len(found)} *.safetensors files and no {INDEX_NAME}"
            if found
            else "no *.safetensors file"
        )
        has_pickles = any(any(self._folder.glob(f"*{suffix}")) for suffix in PICKLE_SUFFIXES)
        hint = f"; {CONVERSION_HINT}" if has_pickles else ""
        raise ModelFileError(f"{self._folder}: {what}; {_SINGLE} was expected{hint}")

    def _open(self, path: Path) -> SafetensorsFile:
        if path not in self._files:
            self._files[path] = SafetensorsFile(path)
        return self._files[path]
