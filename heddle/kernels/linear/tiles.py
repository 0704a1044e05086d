"""How a thread walks through its share of (row block, panel), whatever a panel holds.

Numba cannot keep compiled code that was given functions, so each form of weight gets a copy of the
walk, made around its own step.

Legend: `M` rows, `K` inputs, `N` outputs, `P` panels of 16 outputs.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from heddle.kernels.compiled import given, inner, num_threads, pointer, share, thread_index
from heddle.kernels.linear.panels import WIDTH
from heddle.kernels.vectors import tile_product

MAX_HEIGHT = 6
"""Rows of a register tile: 6 x 2 sums, 2 vectors of weights and one of a row make 15 registers."""
NUM_WORDS = 15
"""x, its row stride, weights, bytes of a panel, bias, out, M, K, N, rows of a block, inputs per
pass, inputs per stretch, inputs of a group, bytes of a group,
row stride of out."""

_tile_1 = tile_product(1, 2)
_tile_2 = tile_product(2, 2)
_tile_3 = tile_product(3, 2)
_tile_4 = tile_product(4, 2)
_tile_5 = tile_product(5, 2)
_tile_6 = tile_product(6, 2)


@inner
def _tile(height, x, x_row, panel, out, out_row, depth):
    if height == 6:
        _tile_6(x, x_row, 1, panel, WIDTH, out, out_row, depth)
    elif height == 5:
        _tile_5(x, x_row, 1, panel, WIDTH, out, out_row, depth)
    elif height == 4:
        _tile_4(x, x_row, 1, panel, WIDTH, out, out_row, depth)
    elif height == 3:
        _tile_3(x, x_row, 1, panel, WIDTH, out, out_row, depth)
    elif height == 2:
        _tile_2(x, x_row, 1, panel, WIDTH, out, out_row, depth)
    else:
        _tile_1(x, x_row, 1, panel, WIDTH, out, out_row, depth)


@inner
def multiply_rows(x, x_row, panel, out, out_row, rows, depth):
    """`out[m] += x[m] @ panel` for all rows, in tiles of nearly equal height."""
    tiles = (rows + MAX_HEIGHT - 1) // MAX_HEIGHT
    for tile in range(tiles):
        first, end = share(rows, tile, tiles)
        _tile(
            end - first,
            x + 4 * first * x_row,
            x_row,
            panel,
            out + 4 * first * out_row,
            out_row,
            depth,
        )


@inner
def _fill(out, out_row, rows, width, bias, first):
    """What the sums start from: biases from `first` on, or zeros where there are none."""
    target = numba.carray(pointer(out), ((rows - 1) * out_row + width,), np.float32)
    for row in range(rows):
        for lane in range(width):
            target[row * out_row + lane] = 0
    if bias != 0:
        biases = numba.carray(pointer(bias + 4 * first), (width,), np.float32)
        for row in range(rows):
            for lane in range(width):
                target[row * out_row + lane] = biases[lane]


@inner
def _add(tile, out, out_row, rows, width):
    """The part of a tile that is there."""
    target = numba.carray(pointer(out), ((rows - 1) * out_row + width,), np.float32)
    for row in range(rows):
        for lane in range(width):
            target[row * out_row + lane] += tile[row, lane]


def walk(step: Any, scratch_of: Any) -> Any:
    """A kernel's body.

    Args:
        step: `(words, x, x_row, panel, out, out_row, rows, start, until, scratch)` adds the product
            of some rows with the inputs `[start, until)` of a panel; all but the words, the range
            and the scratch are addresses and strides.
        scratch_of: `(words, x, rows)` makes what a step needs of a row block.
    """

    @inner
    def run(address):
        w = given(address, NUM_WORDS)
        x, x_row, data, size, bias, out = w[0], w[1], w[2], w[3], w[4], w[5]
        num_rows, depth, width, block, per_pass = w[6], w[7], w[8], w[9], w[10]
        out_row = w[14]
        panels = (width + WIDTH - 1) // WIDTH
        blocks = (num_rows + block - 1) // block
        begin, stop = share(blocks * panels, thread_index(), num_threads())
        while begin < stop:
            place = begin // panels
            first_panel = begin - place * panels
            end_panel = min(panels, first_panel + stop - begin)
            begin += end_panel - first_panel
            first, end = share(num_rows, place, blocks)
            rows, a, c = end - first, x + 4 * first * x_row, out + 4 * first * out_row
            scratch = scratch_of(w, a, rows)
            whole = min(end_panel, width // WIDTH)
            for start in range(0, depth, per_pass):
                until = min(depth, start + per_pass)
                for p in range(first_panel, whole):
                    tile = c + 4 * p * WIDTH
                    if start == 0:
                        _fill(tile, out_row, rows, WIDTH, bias, p * WIDTH)
                    step(w, a, x_row, data + p * size, tile, out_row, rows, start, until, scratch)
            if end_panel > whole:
                count, target = width - whole * WIDTH, c + 4 * whole * WIDTH
                tail = np.zeros((rows, WIDTH), np.float32)
                panel, tile = data + whole * size, tail.ctypes.data
                step(w, a, x_row, panel, tile, WIDTH, rows, 0, depth, scratch)
                _fill(target, out_row, rows, count, bias, whole * WIDTH)
                _add(tail, target, out_row, rows, count)

    return run
