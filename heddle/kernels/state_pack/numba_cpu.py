"""Packing on a CPU: one pass, each destination's rows and lanes in turn.

States of float32 whose elements lie side by side; others go to the reference. There is nothing to
do on the way back: what arrives is merged where it lies, see `reference.unpack`.

Legend: see `reference`.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from heddle.kernels.calls import call
from heddle.kernels.compiled import entry, given, inner, num_threads, pointer, share, thread_index
from heddle.kernels.state_pack import reference
from heddle.kernels.state_pack.reference import Grid


@inner
def _move(out, lse, target, width):
    values = numba.carray(pointer(out), (width,), np.float32)
    block = numba.carray(pointer(target), (width + 1,), np.float32)
    for i in range(width):
        block[i] = values[i]
    block[width] = numba.carray(pointer(lse), (1,), np.float32)[0]


@entry
def _pack(address):
    """Words: out, lse, blocks, N, n, h, Dv, P', rows between row blocks, then bytes between rows
    and lanes of out and lse.
    """
    w = given(address, 13)
    rows, lanes, width = w[4], w[5], w[6]
    first, end = share(w[3] * rows, thread_index(), num_threads())
    for place in range(first, end):
        destination, row = place // rows, place % rows
        source_row = destination % w[7] * w[8] + row
        for lane in range(lanes):
            source_lane = destination // w[7] * lanes + lane
            _move(
                w[0] + source_row * w[9] + source_lane * w[10],
                w[1] + source_row * w[11] + source_lane * w[12],
                w[2] + 4 * (place * lanes + lane) * (width + 1),
                width,
            )


def pack(out: torch.Tensor, lse: torch.Tensor, grid: Grid, *, num_threads: int = 1) -> torch.Tensor:
    """See `reference.pack`."""
    if not (out.dtype is torch.float32 and out.is_cpu and out.stride(-1) == 1):
        return reference.pack(out, lse, grid)
    all_rows, all_lanes, width = out.shape
    num_rows = all_rows if grid.is_copy else all_rows // grid.num_replicas
    num_lanes = all_lanes // grid.slice_size
    blocks = torch.empty(grid.num_replicas * grid.slice_size, num_rows, num_lanes, width + 1)
    words = (
        out.data_ptr(),
        lse.data_ptr(),
        blocks.data_ptr(),
        len(blocks),
        num_rows,
        num_lanes,
        width,
        grid.num_replicas,
        0 if grid.is_copy else num_rows,
        *(4 * step for step in out.stride()[:2]),
        *(4 * step for step in lse.stride()),
    )
    call(_pack, words, blocks.numel(), num_threads)
    return blocks
