"""One safetensors file, mapped; tensors are views of it, read slice by slice.

The safetensors library checks header and size when the file is opened; the views are made here, so
that pages can be dropped once they have been copied.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import check_is_file
from heddle.models.weights.mapped_file import MappedFile
from heddle.models.weights.safetensors_header import StoredInfo, read_header
from heddle.models.weights.source import Span

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class SafetensorsFile:
    """The tensors of one file.

    Raises:
        ModelFileError: the file is missing, damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_is_file(path)
        try:
            path.open("rb").close()  # the library calls missing whatever it cannot open
            with safe_open(str(path), framework="pt", device="cpu"):
                pass
            self._file = MappedFile(path)
        except FileNotFoundError as error:
            raise ModelFileError(f"{path}: is missing; the index names it") from error
        except PermissionError as error:
            raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelFileError(f"{path}: is not a whole safetensors file ({error})") from error
        self.tensors = read_header(path)

    def read(self, name: str, *spans: Span | None) -> torch.Tensor:
        """A view of a slice, in the stored dtype.

        Args:
            name: of a tensor.
            spans: ranges of the first dimensions; None, and further dimensions: all.

        Raises:
            UnsupportedError: a dtype that torch lacks.
        """
        info = self.tensors[name]
        if info.dtype not in _DTYPES:
            raise UnsupportedError(f"{self.path}: {name} is stored as {info.dtype}, unknown here")
        dtype, count = _DTYPES[info.dtype], math.prod(info.shape)
        if count == 0:
            return torch.empty(info.shape, dtype=dtype)[_index(spans)]
        self._file.use(*_extent(info, spans))
        whole = torch.frombuffer(self._file.buffer, dtype=dtype, count=count, offset=info.offset)
        return whole.view(info.shape)[_index(spans)]

    def prefetch(self, name: str, rows: Span | None) -> None:
        """Start reading rows from disk, in the background."""
        self._file.prefetch(*_extent(self.tensors[name], (rows,)))


def _extent(info: StoredInfo, spans: tuple[Span | None, ...]) -> Span:
    """Bytes from the first row of a slice to the end of its last one."""
    if not info.shape or info.dtype not in _DTYPES:
        return info.offset, info.offset
    first, last = (spans[0] if spans else None) or (0, info.shape[0])
    row_bytes = math.prod(info.shape[1:]) * _DTYPES[info.dtype].itemsize
    return info.offset + first * row_bytes, info.offset + last * row_bytes


def _index(spans: tuple[Span | None, ...]) -> tuple[slice, ...]:
    return tuple(slice(*(span or (None, None))) for span in spans)
