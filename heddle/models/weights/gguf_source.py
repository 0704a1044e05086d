"""Weights from a GGUF file, dequantised slice by slice.

The file is mapped, never read whole. A column range is widened to whole quantisation blocks,
dequantised and trimmed, so any cut over ranks gives the numbers of the uncut matrix.

Rotary order: files of the `llama` and `granite` kinds store query and key rows with the two
elements of a rotary pair side by side. Row `(head, pair, half)` of the file is row
`(head, half, pair)` of the checkpoint; the order is undone here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields
from heddle.models.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from heddle.models.weights.mapped_file import MappedFile
from heddle.models.weights.source import Span

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_PATTERN = re.compile(r"(\w+)\.(weight|bias)")
_ROTARY_PATTERN = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)")
_PAIRED_ARCHITECTURES = ("llama", "granite")
_CHUNK_ELEMENTS = 8192
_UNREADABLE = frozenset(
    kind
    for kind in gguf.GGMLQuantizationType
    if kind.name in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0")
)


def checkpoint_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that is not known stays as it is.

    Example:
        >>> checkpoint_name("blk.3.attn_q.weight")
        'model.layers.3.self_attn.q_proj.weight'
    """
    if (match := _LAYER_PATTERN.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    if (match := _TOP_PATTERN.fullmatch(name)) and match[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[match[1]]}.{match[2]}"
    return name


class GgufSource:
    """A `WeightSource` over one `.gguf` file.

    Raises:
        ModelFileError: the file is damaged, or shorter than its tensors; names file, tensor and
            bytes.
        UnsupportedError: a tensor is stored in a form that is not known.
    """

    def __init__(self, path: str | Path) -> None:
        header = read_gguf_header(path)
        self._path = header.path
        self._stored = {checkpoint_name(name): name for name in header.tensors}
        self._tensors = header.tensors
        for name in header.tensors:
            other = self._stored[checkpoint_name(name)]
            if other != name:
                raise ModelFileError(f"{header.path}: {name} and {other} are one tensor")
        _check_overlap(
            header, {name: _extent(header, name, x) for name, x in header.tensors.items()}
        )
        self._file = MappedFile(header.path)
        self._bytes = np.frombuffer(self._file.buffer, dtype=np.uint8)
        self._paired_head_dim = _paired_head_dim(Fields(header.path, header.entries))

    def names(self) -> tuple[str, ...]:
        """All tensor names."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return self._tensors[self._stored[name]].shape

    def location(self, name: str) -> str:
        """The file, and the tensor's name in it."""
        stored = self._stored.get(name)
        return str(self._path) if stored is None else f"{self._path} (there {stored})"

    def read(
        self,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        depth: Span | None = None,
    ) -> torch.Tensor:
        """A slice of a tensor, as float32; see `WeightSource.read`."""
        assert depth is None, "nothing beyond matrices is read from these files"
        tensor = self._tensors[self._stored[name]]
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        start, end = cols or (0, tensor.shape[1] if len(tensor.shape) > 1 else 1)
        first = start // block * block
        stored = self.read_blocks(name, rows, (first, end))
        flat = stored.reshape(stored.shape[0], stored.shape[1] * stored.shape[2])
        part = _dequantize(flat, kind)[:, start - first : end - first]
        return torch.from_numpy(np.ascontiguousarray(part if len(tensor.shape) > 1 else part[:, 0]))

    def stored_kind(self, name: str) -> str:
        """What GGML calls the form of a tensor."""
        return str(gguf.GGMLQuantizationType(self._tensors[self._stored[name]].type_id).name)

    def read_blocks(
        self, name: str, rows: Span | None = None, cols: Span | None = None
    ) -> npt.NDArray[np.uint8]:
        """`[rows, blocks, bytes of a block]`, a copy; see `BlockSource.read_blocks`."""
        tensor = self._tensors[self._stored[name]]
        start, end = rows or (0, tensor.shape[0])
        if self._paired_head_dim is None or not _ROTARY_PATTERN.fullmatch(name):
            return self._cut(tensor, (start, end), cols)
        # Whole heads, put in order, then trimmed.
        width = self._paired_head_dim
        first, last = start // width * width, -(-end // width) * width
        return _unpair(self._cut(tensor, (first, last), cols), width)[start - first : end - first]

    def _cut(self, tensor: GgufTensor, rows: Span, cols: Span | None) -> npt.NDArray[np.uint8]:
        """Rows and whole blocks of a stored matrix `[n, m]`; a vector `[n]` counts as `[n, 1]`."""
        num_cols = tensor.shape[1] if len(tensor.shape) > 1 else 1
        start, end = cols or (0, num_cols)
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
        row_bytes = num_cols // block * block_bytes
        begin = tensor.offset + rows[0] * row_bytes
        end_byte = begin + (rows[1] - rows[0]) * row_bytes
        self._file.use(begin, end_byte)
        stored = self._bytes[begin:end_byte]
        blocks = stored.reshape(rows[1] - rows[0], num_cols // block, block_bytes)
        return np.array(blocks[:, start // block : -(-end // block)])


def _dequantize(stored: npt.NDArray[np.uint8], kind: Any) -> npt.NDArray[np.float32]:
    """`[n, row bytes]` -> `[n, m]`.

    Blocks are regrouped into long rows first: the library works through a few rows at a time, and
    short rows make it slow.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (stored.shape[0], stored.shape[1] // block_bytes * block)
    num_blocks = stored.size // block_bytes
    if num_blocks == 0:
        return np.zeros(shape, dtype=np.float32)
    group = math.gcd(num_blocks, max(1, _CHUNK_ELEMENTS // block))
    values: npt.NDArray[np.float32] = gguf.dequantize(
        stored.reshape(num_blocks // group, group * block_bytes), kind
    )
    return values.reshape(shape)


def _extent(header: GgufHeader, name: str, tensor: GgufTensor) -> Span:
    """Bytes of the file that hold a tensor, in Python's integers, which have no end.

    Raises:
        ModelFileError: the file ends before them.
        UnsupportedError: the tensor is of a form that is not read.
    """
    try:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
    except ValueError:
        kind = None
    if kind is None or kind in _UNREADABLE:
        stored = f"type {tensor.type_id}" if kind is None else kind.name
        raise UnsupportedError(
            f"{header.path}: {name} is stored as {stored}, which is not read; "
            "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and the K types are"
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_cols = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    if len(tensor.shape) not in (1, 2) or num_cols % block or 0 in tensor.shape:
        raise UnsupportedError(
            f"{header.path}: {name} has shape {tensor.shape} in blocks of {block}; "
            "vectors, and matrices whose rows are whole blocks, are read, none of them empty"
        )
    num_bytes = math.prod(tensor.shape) // block * block_bytes
    if tensor.offset + num_bytes > header.size_bytes:
        raise ModelFileError(
            f"{header.path}: is truncated; {name} needs {num_bytes} bytes from byte "
            f"{tensor.offset}, the file has {header.size_bytes} bytes"
        )
    return tensor.offset, tensor.offset + num_bytes


def _check_overlap(header: GgufHeader, extents: Mapping[str, Span]) -> None:
    """Refuse tensors that share bytes: one of the two offsets is damaged."""
    in_order = sorted((span, name) for name, span in extents.items() if span[1] > span[0])
    for (span, name), (following, other) in itertools.pairwise(in_order):
        if following[0] < span[1]:
            raise ModelFileError(f"{header.path}: {name} and {other} overlap in the file")


def _paired_head_dim(fields: Fields) -> int | None:
    """Head width where rotary pairs are stored side by side; None where they are not."""
    name = fields.text("general.architecture")
    if name not in _PAIRED_ARCHITECTURES:
        return None
    key = f"{name}.attention.key_length"
    if key in fields:
        return fields.integer(key)
    heads = fields.integer(f"{name}.attention.head_count")
    return fields.integer(f"{name}.embedding_length") // heads


def _unpair(rows: npt.NDArray[np.uint8], head_dim: int) -> npt.NDArray[np.uint8]:
    """Rows `[n, blocks, bytes]` in the order (head, pair, half) -> (head, half, pair)."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)
