"""How the weights of a checkpoint are quantised, read from `quantization_config` of `config.json`.

Only what the readers of the weights need is kept: widths, and the sizes of the blocks that share a
scale. Which tensors are quantised is seen in the files, not taken from lists of module names. How a
writer would have activations or the cache quantised while serving is not followed: weights are
dequantised at load and products are computed in the serving dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle.errors import UnsupportedError
from heddle.models.config_fields import Fields

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
PACKED_WIDTHS = (2, 4, 8)
"""Bits of the integers that are read."""

_HINT = (
    "load and dequantise the model with the library that wrote it, and save it in 16 bit; "
    f"read here: {', '.join(METHODS)}, and .gguf files"
)
_KEYS = ("quantization_config", "compression_config")
_ALL_COLUMNS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """What is common to the quantised tensors of a checkpoint."""

    method: str
    """One of `METHODS`."""
    bits: int = 8
    """Of a number, where the method has one width."""
    widths: tuple[int, ...] = ()
    """Bits that an integer may have, where tensors may differ; empty: the file states none."""
    block_shapes: tuple[tuple[int, int], ...] = ()
    """Rows and columns that may share a scale, of matrices `[out, in]`."""
    group_size: int | None = None
    """Columns that share a scale, where the method has one size; None: all."""
    adds_one_to_zeros: bool = False
    """Zero points are stored less 1."""


def read_quantization(fields: Fields) -> Quantization | None:
    """Read how weights are quantised.

    Args:
        fields: the top level of `config.json`.

    Returns:
        None for weights stored in 16 bit or more.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a method, or a variant of it, is not read here.
    """
    section = _section(fields)
    if section is None:
        return None
    method = _method(fields, section)
    if method not in METHODS:
        raise section.unsupported("quant_method", _HINT)
    if method in ("fp8", "fbgemm_fp8"):
        return _read_fp8(section, method)
    if method == "compressed-tensors":
        return _read_compressed(section)
    if method == "awq":
        return _read_awq(section)
    if method == "gptq":
        return _read_gptq(section)
    return Quantization(method="mxfp4", bits=4)


def named_method(fields: Fields) -> str | None:
    """Name of the method, whether it is read here or not.

    Args:
        fields: the top level of `config.json`.

    Returns:
        None for weights stored in 16 bit or more.

    Raises:
        ModelFileError: the section, or the name in it, is missing or malformed.
    """
    section = _section(fields)
    return None if section is None else _method(fields, section)


def _section(fields: Fields) -> Fields | None:
    """The part of `config.json` that says how weights are quantised."""
    sections = (fields.section(key) for key in _KEYS)
    return next((found for found in sections if found is not None), None)


def _method(fields: Fields, section: Fields) -> str:
    return section.text("quant_method", "compressed-tensors" if _is_old(fields) else None)


def _is_old(fields: Fields) -> bool:
    """Early files of compressed-tensors do not name their method."""
    return "compression_config" in fields


def _read_fp8(fields: Fields, method: str) -> Quantization:
    if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.unsupported("fmt", "known: e4m3")
    sizes = fields.integers("weight_block_size", minimum=1)
    if sizes and len(sizes) != 2:
        raise fields.wrong("weight_block_size", "two sizes were expected")
    return Quantization(method=method, block_shapes=((sizes[0], sizes[1]),) if sizes else ())


def _read_compressed(fields: Fields) -> Quantization:
    if fields.text("quantization_status", "compressed") != "compressed":
        raise fields.unsupported("quantization_status", "weights must be stored compressed")
    sparsity = fields.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise sparsity.unsupported("format", f"sparse forms are not read; {_HINT}")
    transforms = fields.section("transform_config")
    if transforms is not None and transforms.section("config_groups"):
        raise UnsupportedError(
            f"{fields.path}: quantization_config.transform_config is not supported; {_HINT}"
        )
    groups = fields.section("config_groups")
    widths: list[int] = []
    shapes: list[tuple[int, int]] = []
    for name in groups or ():
        group = groups.section(name) if groups is not None else None
        if group is not None:
            _require_format(group if "format" in group else fields)
            weights = group.section("weights")
            if weights is not None:
                widths += _read_widths(weights)
                shapes += _read_blocks(weights)
    return Quantization(
        method="compressed-tensors",
        widths=tuple(dict.fromkeys(widths)),
        block_shapes=tuple(dict.fromkeys(shapes)),
    )


def _require_format(fields: Fields) -> None:
    if fields.text("format", COMPRESSED_FORMATS[0]) not in COMPRESSED_FORMATS:
        raise fields.unsupported("format", f"known: {', '.join(COMPRESSED_FORMATS)}")


def _read_widths(weights: Fields) -> tuple[int, ...]:
    """Bits that an integer of one group of modules may have: one width, or all if none is stated.

    Floats have none: their dtype tells how they are read.
    """
    bits = weights.optional_integer("num_bits")
    if weights.text("type", "int") == "float":
        if bits not in (None, 8):
            raise weights.unsupported("num_bits", "floats of 8 bits are read")
        return ()
    if bits is None:
        return PACKED_WIDTHS
    if bits not in PACKED_WIDTHS:
        raise weights.unsupported("num_bits", "integers of 2, 4 or 8 bits are read")
    return (bits,)


def _read_blocks(weights: Fields) -> list[tuple[int, int]]:
    """Block shapes of one group of modules, as far as they do not follow from the matrix."""
    strategy = weights.text("strategy", "tensor")
    if strategy == "group":
        size = weights.integer("group_size", _ALL_COLUMNS, minimum=_ALL_COLUMNS)
        return [(1, size)] if size > 0 else []
    if strategy == "block":
        sizes = weights.integers("block_structure", minimum=1)
        if len(sizes) != 2:
            raise weights.wrong("block_structure", "two sizes were expected")
        return [(sizes[0], sizes[1])]
    if strategy not in ("tensor", "channel"):
        raise weights.unsupported("strategy", "known: tensor, channel, group, block")
    return []


def _read_awq(fields: Fields) -> Quantization:
    if fields.text("version", "gemm").lower() != "gemm":
        raise fields.unsupported("version", "known: gemm")
    if (bits := fields.integer("bits" if "bits" in fields else "w_bit")) != 4:
        raise fields.unsupported("bits", "4 is read")
    key = "group_size" if "group_size" in fields else "q_group_size"
    return Quantization(method="awq", bits=bits, group_size=_group_size(fields, key))


def _read_gptq(fields: Fields) -> Quantization:
    form = fields.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise fields.unsupported("checkpoint_format", "known: gptq, gptq_v2")
    if fields.boolean("is_marlin_format", False):
        raise fields.unsupported("is_marlin_format", _HINT)
    if (bits := fields.integer("bits")) not in PACKED_WIDTHS:
        raise fields.unsupported("bits", "2, 4 and 8 are read")
    dynamic = fields.section("dynamic")
    if dynamic is not None and any(not pattern.startswith("-:") for pattern in dynamic):
        raise fields.unsupported("dynamic", "one width and group size for all modules is read")
    return Quantization(
        method="gptq",
        bits=bits,
        group_size=_group_size(fields, "group_size"),
        adds_one_to_zeros=form == "gptq",
    )


def _group_size(fields: Fields, key: str) -> int | None:
    size = fields.integer(key, _ALL_COLUMNS, minimum=_ALL_COLUMNS)
    if size == 0:
        raise fields.wrong(key, "a positive size, or -1 for all columns, was expected")
    return None if size == _ALL_COLUMNS else size
