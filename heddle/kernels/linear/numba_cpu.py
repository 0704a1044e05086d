"""Products of float32 rows with packed weights, on a CPU.

    for rows that fit a core's own cache, for a stretch of K, for each panel, for 1 to 6 rows:
        a tile of 6 x 16 outputs in registers  +=  x[6, stretch] @ panel[stretch, 16]

The work is the list of (row block, panel), cut evenly: one row makes every thread read its own part
of the weights from start to end. An output is summed over K in one order whatever the number of
threads, so no bit depends on it; with float32 weights no bit of a row depends on how many others
there are either.

Weights of 4 and 8 bits are unpacked in registers for few rows, and once per stretch for many.

Legend: `M` rows, `K` inputs, `N` outputs, `P` panels of 16 outputs.
"""

from __future__ import annotations

from array import array
from typing import Any

import numba
import numpy as np
import torch

from heddle.kernels.compiled import entry, inner, pointer
from heddle.kernels.linear import reference
from heddle.kernels.linear.base import PackedWeight, Segments, Weight
from heddle.kernels.linear.panels import WIDTH, Panels
from heddle.kernels.linear.quantized import BLOCK, BytePanels, NibblePanels
from heddle.kernels.linear.quantized_tiles import (
    byte_tile,
    nibble_tile,
    unpack_bytes,
    unpack_nibbles,
)
from heddle.kernels.linear.tiles import MAX_HEIGHT, multiply_rows, walk
from heddle.kernels.threads import launch

STRETCH = 256
"""Inputs of a panel that stay in the first cache, 16 KB of floats."""
ROW_BYTES = 192 << 10
"""Of the rows that pass by meanwhile, in the second cache."""
FEW = 4
"""Rows for which each weight is unpacked anew."""


@inner
def _no_scratch(words, x, rows):  # noqa: ARG001
    return np.empty((0, 0), np.float32)


@inner
def _float_step(words, x, x_row, panel, out, out_row, rows, start, until, scratch):  # noqa: ARG001
    for k in range(start, until, words[11]):
        count = min(until, k + words[11]) - k
        multiply_rows(x + 4 * k, x_row, panel + 4 * k * WIDTH, out, out_row, rows, count)


_run_floats = walk(_float_step, _no_scratch)


@entry
def _floats(address):
    _run_floats(address)


@inner
def _unpacked(words, x, rows):  # noqa: ARG001
    """Room for a stretch of weights."""
    return np.empty((words[11], WIDTH), np.float32)


_byte_1, _byte_2, _byte_3, _byte_4 = byte_tile(1), byte_tile(2), byte_tile(3), byte_tile(4)
_unpack_bytes = unpack_bytes()


@inner
def _byte_step(words, x, x_row, panel, out, out_row, rows, start, until, scratch):
    group, groups = words[12], words[7] // words[12]
    if words[6] > FEW:
        for k in range(start, until, words[11]):
            count = min(until, k + words[11]) - k
            first = panel + k // group * words[13]
            _unpack_bytes(first, scratch.ctypes.data, count // group, group)
            multiply_rows(x + 4 * k, x_row, scratch.ctypes.data, out, out_row, rows, count)
    elif rows == 1:
        _byte_1(x, x_row, panel, out, out_row, groups, group)
    elif rows == 2:
        _byte_2(x, x_row, panel, out, out_row, groups, group)
    elif rows == 3:
        _byte_3(x, x_row, panel, out, out_row, groups, group)
    else:
        _byte_4(x, x_row, panel, out, out_row, groups, group)


_run_bytes = walk(_byte_step, _unpacked)


@entry
def _bytes(address):
    _run_bytes(address)


@inner
def _nibble_scratch(words, x, rows):
    """Of few rows the sums over blocks, which offsets are multiplied by."""
    if words[6] > FEW:
        return _unpacked(words, x, rows)
    blocks = words[7] // BLOCK
    sums = np.empty((rows, blocks), np.float32)
    for row in range(rows):
        values = numba.carray(pointer(x + 4 * row * words[1]), (words[7],), np.float32)
        for b in range(blocks):
            total = np.float32(0)
            for k in range(b * BLOCK, (b + 1) * BLOCK):
                total += values[k]
            sums[row, b] = total
    return sums


def _nibble_step(*, is_half: bool) -> Any:
    """The step for one width of scales."""
    tile_1, tile_2, tile_3, tile_4 = (nibble_tile(n, is_half=is_half) for n in range(1, FEW + 1))
    unpack = unpack_nibbles(is_half=is_half)

    @inner
    def step(words, x, x_row, panel, out, out_row, rows, start, until, scratch):
        if words[6] > FEW:
            for k in range(start, until, words[11]):
                count = min(until, k + words[11]) - k
                unpack(panel + k // BLOCK * words[13], scratch.ctypes.data, count // BLOCK)
                multiply_rows(x + 4 * k, x_row, scratch.ctypes.data, out, out_row, rows, count)
            return
        blocks = words[7] // BLOCK
        sums = scratch.ctypes.data
        if rows == 1:
            tile_1(x, x_row, sums, blocks, panel, out, out_row, blocks)
        elif rows == 2:
            tile_2(x, x_row, sums, blocks, panel, out, out_row, blocks)
        elif rows == 3:
            tile_3(x, x_row, sums, blocks, panel, out, out_row, blocks)
        else:
            tile_4(x, x_row, sums, blocks, panel, out, out_row, blocks)

    return step


_run_half_nibbles = walk(_nibble_step(is_half=True), _nibble_scratch)
_run_nibbles = walk(_nibble_step(is_half=False), _nibble_scratch)


@entry
def _half_nibbles(address):
    _run_half_nibbles(address)


@entry
def _nibbles(address):
    _run_nibbles(address)


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    num_threads: int = 1,
) -> torch.Tensor:
    """See the reference, which takes plain weights, other dtypes, and no inputs at all."""
    if isinstance(weight, torch.Tensor):
        return reference.linear(x, weight, bias)
    parts = weight.parts if isinstance(weight, Segments) else (weight,)
    forms = [form for part in parts if (form := _form(part)) is not None]
    if len(forms) < len(parts) or x.dtype is not torch.float32 or not x.is_cpu or x.shape[1] == 0:
        return reference.linear(x, weight, bias)
    assert bias is None or (bias.dtype is torch.float32 and bias.is_contiguous()), "a plain bias"
    if x.stride(1) != 1:
        x = x.contiguous()
    sizes = [part.num_outputs for part in parts]
    out = torch.empty((x.shape[0], sum(sizes)))
    if out.numel() == 0:
        return out
    start = 0
    for form, size in zip(forms, sizes, strict=True):
        biases = 0 if bias is None else bias.data_ptr() + 4 * start
        _run(form, x, biases, out, start, size, num_threads)
        start += size
    return out


_Form = tuple[int, torch.Tensor, int]
"""Kernel, memory, and inputs of a group."""


def _run(
    form: _Form, x: torch.Tensor, bias: int, out: torch.Tensor, start: int, size: int, threads: int
) -> None:
    """Outputs `[start, start + size)`; the bias is an address, or 0."""
    address, data, group = form
    num_rows, depth = x.shape
    stretch = STRETCH if group > 1 else -(-depth // -(-depth // STRETCH))
    block = max(MAX_HEIGHT, ROW_BYTES // (4 * stretch) // MAX_HEIGHT * MAX_HEIGHT)
    is_low = num_rows <= FEW or 4 * depth * min(num_rows, block) <= ROW_BYTES
    panel_bytes = data.stride(0) * data.element_size()
    words = (
        x.data_ptr(),
        x.stride(0),
        data.data_ptr(),
        panel_bytes,
        bias,
        out.data_ptr() + 4 * start,
        num_rows,
        depth,
        size,
        block,
        depth if is_low else stretch,
        stretch,
        group,
        panel_bytes // (depth // group),
        out.shape[1],
    )
    launch(address, array("q", words), threads)


def _form(weight: PackedWeight) -> _Form | None:
    """None of a weight that is left to the reference."""
    if isinstance(weight, Panels) and weight.data.dtype is torch.float32:
        return _floats, weight.data, 1
    if isinstance(weight, NibblePanels):
        return _half_nibbles if weight.is_half else _nibbles, weight.data, BLOCK
    if isinstance(weight, BytePanels):
        return _bytes, weight.data, weight.group
    return None
