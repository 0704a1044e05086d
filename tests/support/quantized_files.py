"""Quantised tensors, packed number by number as the formats are described, and their values.

No packing here is shared with the readers. `write` functions return the parts of a tensor by their
suffix, and the matrix `[out, in]` that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from heddle.models.config_fields import Fields
from heddle.models.config_quantization import read_quantization
from heddle.models.weights.dequantized import DequantizedSource
from heddle.models.weights.quantized import dequantize
from heddle.models.weights.safetensors_source import SafetensorsSource

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
Writer = Callable[[int, int, int], Written]
"""Called with (outputs, inputs, seed)."""
Matrix = tuple[DequantizedSource, torch.Tensor]
"""A source over `x.weight`, and what it stands for."""


def words_of(fields: np.ndarray, bits: int) -> np.ndarray:
    """Fields `[a, b]`, the last dimension packed, low bits first -> int32 `[a, b * bits / 32]`."""
    per_word = 32 // bits
    rows = []
    for line in fields:
        padded = [*line.tolist(), *([0] * (-len(line) % per_word))]
        words = [
            sum(int(x) << (bits * place) for place, x in enumerate(padded[at : at + per_word]))
            for at in range(0, len(padded), per_word)
        ]
        rows.append(np.array(words, dtype=np.uint32))
    return np.stack(rows).view(np.int32)


def awq(group_size: int) -> tuple[dict[str, Any], Writer]:
    """AWQ, gemm layout, 4 bits."""

    def write(n: int, m: int, seed: int) -> Written:
        rng = np.random.default_rng(seed)
        size = m if group_size == -1 else group_size
        codes, zeros = rng.integers(0, 16, (m, n)), rng.integers(0, 16, (m // size, n))
        scales = rng.uniform(0.01, 0.02, (m // size, n)).astype(np.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # the number that lies at each place

        def packed(fields: np.ndarray) -> torch.Tensor:
            turned = fields.reshape(len(fields), -1, 8)[:, :, order].reshape(fields.shape)
            return torch.from_numpy(words_of(turned, 4))

        parts = {
            "qweight": packed(codes),
            "qzeros": packed(zeros),
            "scales": torch.from_numpy(scales),
        }
        return parts, grouped_values(codes, zeros, scales, np.arange(m) // size)

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    return config, write


def gptq(
    bits: int, group_size: int, *, form: str = "gptq", acts_in_order: bool = True
) -> tuple[dict[str, Any], Writer]:
    """GPTQ: form 1 or 2, groups in the order of the inputs or of their weight."""

    def write(n: int, m: int, seed: int) -> Written:
        rng = np.random.default_rng(seed)
        size, top = m if group_size == -1 else group_size, 1 << bits
        codes, zeros = rng.integers(0, top, (m, n)), rng.integers(0, top, (m // size, n))
        scales = rng.uniform(0.01, 0.02, (m // size, n)).astype(np.float16)
        index = np.arange(m) // size
        if not acts_in_order:
            index = rng.permutation(index)
        words = words_of(zeros, bits)
        if form == "gptq":  # less one in each field, borrowing from the next where it was none
            ones = sum(1 << shift for shift in range(0, 32, bits))
            words = (words.view(np.uint32).astype(np.int64) - ones) % (1 << 32)
            words = words.astype(np.uint32).view(np.int32)
        parts = {
            "qweight": torch.from_numpy(np.ascontiguousarray(words_of(codes.T, bits).T)),
            "qzeros": torch.from_numpy(words),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return parts, grouped_values(codes, zeros, scales, index)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size}
    return config | {"desc_act": not acts_in_order, "checkpoint_format": form}, write


def grouped_values(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, index: np.ndarray
) -> torch.Tensor:
    """`[out, in]` from codes `[in, out]` and the group of each input."""
    values = (codes - zeros[index]) * scales[index].astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(values.T.astype(np.float32)))


def fp8(block: tuple[int, int] | None, *, suffix: str = "weight_scale_inv") -> tuple[Any, Writer]:
    """8-bit floats with a scale per block, or one scale."""

    def write(n: int, m: int, seed: int) -> Written:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randn(n, m, generator=generator).mul(40).to(torch.float8_e4m3fn)
        rows, cols = block or (n, m)
        grid = torch.rand(-(-n // rows), -(-m // cols), generator=generator) * 0.01 + 0.001
        spread = grid.double().repeat_interleave(rows, 0)[:n].repeat_interleave(cols, 1)[:, :m]
        values = codes.double() * spread
        parts = {"weight": codes, suffix: grid if block else grid.view(())}
        return parts | {"input_scale": torch.ones(1)}, values.float()

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return config | ({"weight_block_size": list(block)} if block else {}), write


def compressed(form: str, **weights: Any) -> tuple[dict[str, Any], Writer]:
    """A matrix compressed by the public library, and as it decompresses it."""

    def write(n: int, m: int, seed: int) -> Written:
        generator = torch.Generator().manual_seed(seed)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        shape = _grid_shape(n, m, weights)
        scale = torch.rand(shape, generator=generator) * 0.01 + 0.01
        state = {"weight": torch.randn(n, m, generator=generator), "weight_scale": scale}
        state["weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)
        if not weights.get("symmetric", True):
            half = 1 << (weights["num_bits"] - 1)
            drawn = torch.randint(-half, half, shape, generator=generator)
            state["weight_zero_point"] = drawn.to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(form)
        parts = compressor.compress(state, scheme)
        values = compressor.decompress(dict(parts), scheme)["weight"]
        return {key: part.contiguous() for key, part in parts.items()}, values

    group = {"weights": weights, "targets": ["Linear"]}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}
    return config | {"quantization_status": "compressed"}, write


def _grid_shape(n: int, m: int, weights: dict[str, Any]) -> tuple[int, ...]:
    if weights["strategy"] == "tensor":
        return (1,)
    if weights["strategy"] == "channel":
        return (n, 1)
    if weights["strategy"] == "group":
        return (n, m // weights["group_size"])
    rows, cols = weights["block_structure"]
    return (-(-n // rows), -(-m // cols))


def open_parts(
    folder: Path, config: Mapping[str, Any], parts: dict[str, torch.Tensor]
) -> DequantizedSource:
    """A source over one quantised tensor, `x.weight`."""
    save_file({f"x.{key}": part for key, part in parts.items()}, folder / "model.safetensors")
    quantization = read_quantization(Fields(folder, {"quantization_config": config}))
    assert quantization is not None
    return dequantize(SafetensorsSource(folder), quantization)


def open_cases(
    folder: Path,
    cases: Mapping[str, tuple[dict[str, Any], Writer]],
    num_outputs: int,
    num_inputs: int,
) -> dict[str, Matrix]:
    """A source over one matrix for each case, and its values."""
    found = {}
    for name, (config, write) in cases.items():
        (folder / name).mkdir()
        parts, values = write(num_outputs, num_inputs, 3)
        found[name] = (open_parts(folder / name, config, parts), values)
    return found


def check_any_slice(matrix: Matrix, data: st.DataObject, *, atol: float) -> None:
    """Rows and columns that are drawn read as they stand in the whole matrix, in float32.

    Args:
        matrix: from `open_cases`.
        data: draws the slice.
        atol: for values near zero, whose sums of a zero point round in another order.
    """
    source, values = matrix
    assert source.names() == ("x.weight",)
    assert source.shape("x.weight") == tuple(values.shape)
    assert values.unique().numel() > 50
    rows, cols = (
        tuple(sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))))
        for size in values.shape
    )
    part = source.read("x.weight", rows, cols)
    assert part.dtype == torch.float32
    expected = values[slice(*rows), slice(*cols)]
    torch.testing.assert_close(part, expected, rtol=1e-6, atol=atol)
    whole_rows = source.read("x.weight", rows)
    torch.testing.assert_close(whole_rows, values[slice(*rows)], rtol=1e-6, atol=atol)


def write_quantized(
    folder: Path,
    checkpoint: Path,
    config: dict[str, Any],
    write: Writer | None,
    sizes: Mapping[int, int],
) -> tuple[Path, Path]:
    """Two folders of one model: its projections quantised, and as the plain numbers they stand for.

    Args:
        folder: where both are made.
        checkpoint: whose names and shapes they have.
        config: the section that says how weights are quantised.
        write: makes the parts of a matrix; None: only fused experts are quantised.
        sizes: other sizes for some dimensions, so that they are whole groups.

    Returns:
        The quantised one, and the plain one.
    """
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    tensors = load_file(checkpoint / "model.safetensors")
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        shape = tuple(sizes.get(size, size) for size in tensor.shape)
        is_matrix = name.endswith("_proj.weight") or (
            name.endswith(".weight") and ".experts." in name
        )
        if is_matrix and write is not None:
            parts, plain[name] = write(shape[0], shape[1], seed)
            stored |= {f"{name.removesuffix('weight')}{key}": part for key, part in parts.items()}
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, plain[name] = mxfp4(shape, seed)
            stored |= {f"{name}{key}": part for key, part in parts.items()}
        else:
            generator = torch.Generator().manual_seed(seed)
            same = shape == tuple(tensor.shape)
            plain[name] = tensor if same else torch.rand(shape, generator=generator)
            stored[name] = plain[name]
    data = json.loads((checkpoint / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size"):
        data[key] = sizes.get(data[key], data[key])
    paths = folder / "quantised", folder / "plain"
    sections: tuple[dict[str, Any], ...] = ({"quantization_config": config}, {})
    for path, weights, section in zip(paths, (stored, plain), sections, strict=True):
        path.mkdir()
        save_file(weights, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(data | section))
    return paths


def mxfp4(shape: tuple[int, ...], seed: int) -> Written:
    """4-bit floats of experts `[x, in, out]`."""
    num_experts, m, n = shape
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (num_experts, n, m // 32, 32), dtype=np.uint8)
    scales = rng.integers(122, 126, (num_experts, n, m // 32), dtype=np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[codes] * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    matrices = values.reshape(num_experts, n, m).swapaxes(1, 2).astype(np.float32)
    parts = {
        "_blocks": torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4),
        "_scales": torch.from_numpy(scales),
    }
    return parts, torch.from_numpy(np.ascontiguousarray(matrices))
