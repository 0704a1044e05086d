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

import numpy as np
import torch

from heddle.kernels.compiled import bits_as_float, entry, inner
from heddle.kernels.linear import reference
from heddle.kernels.linear.base import PackedWeight, Segments, Weight
from heddle.kernels.linear.panels import WIDTH, Panels
from heddle.kernels.linear.quantized import BLOCK, BytePanels, NibblePanels
from heddle.kernels.linear.quantized_rows import PackedForm, spread_row
from heddle.kernels.linear.quantized_tiles import packed_tile, unpack
from heddle.kernels.linear.tiles import MAX_HEIGHT, multiply_rows, walk
from heddle.kernels.threads import launch

STRETCH = 256
"""Inputs of a panel that stay in the first cache, 16 KB of floats."""
ROW_BYTES = 192 << 10
"""Of the rows that pass by meanwhile, in the second cache."""
FEW = 4
"""Rows for which weights are unpacked in registers."""


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
def _counts(number):
    """Whether bits of small numbers count here: a process may have subnormals read as zeros."""
    return bits_as_float(np.int32(number)) * np.float32(2.0**126) > 0


def _packed_walk(form: PackedForm) -> Any:
    """The walk for a form of packed weights."""
    one, two, spread, unpack_groups = (
        packed_tile(form, 1),
        packed_tile(form, 2),
        spread_row(form),
        unpack(form),
    )
    converts = form.converts

    @inner
    def is_few(num_rows):
        return num_rows <= FEW and (converts or _counts(num_rows))

    @inner
    def scratch_of(words, x, rows):
        """Room for a stretch of weights; of few rows the rows as tiles read them."""
        if not is_few(words[6]):
            return np.empty((words[11], WIDTH), np.float32)
        depth, group, groups = words[7], words[12], words[7] // words[12]
        spreads = np.empty((rows, depth + 2 * groups + 1), np.float32)
        for m in range(rows):
            target = spreads[m].ctypes.data
            row = x + 4 * m * words[1]
            spreads[m, depth + 2 * groups] = spread(row, target, target + 4 * depth, groups, group)
        return spreads

    @inner
    def step(words, x, x_row, panel, out, out_row, rows, start, until, scratch):
        depth, group, spreads = words[7], words[12], scratch.ctypes.data
        if not is_few(words[6]):
            for k in range(start, until, words[11]):
                count = min(until, k + words[11]) - k
                unpack_groups(panel + k // group * words[13], spreads, count // group, group)
                multiply_rows(x + 4 * k, x_row, spreads, out, out_row, rows, count)
            return
        groups = depth // group
        width = depth + 2 * groups + 1
        for m in range(0, rows, 2):
            a, c = spreads + 4 * m * width, out + 4 * m * out_row
            starts, units = a + 4 * depth, a + 4 * (width - 1)
            if rows - m == 1:
                one(a, width, starts, units, panel, c, out_row, groups, group)
            else:
                two(a, width, starts, units, panel, c, out_row, groups, group)

    return walk(step, scratch_of)


_run_bytes = _packed_walk(PackedForm(bits=8))
_run_half_nibbles = _packed_walk(PackedForm(bits=4, is_half=True))
_run_nibbles = _packed_walk(PackedForm(bits=4))


@entry
def _bytes(address):
    _run_bytes(address)


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
