"""A tile gives the product whether numbers are converted or read as subnormals."""

from __future__ import annotations

import numpy as np
import pytest

from heddle.kernels.compiled import inner
from heddle.kernels.linear.quantized_rows import PackedForm, spread_row
from heddle.kernels.linear.quantized_tiles import packed_tile
from tests.kernels.bounds import randn
from tests.kernels.linear.test_numba_cpu import packed

BLOCK = 32


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_any_processor_gets_the_product(bits, converts):
    form = PackedForm(bits=bits, is_half=bits == 4, converts=converts)
    spread, tile = spread_row(form), packed_tile(form, 1)

    @inner
    def run(x, room, data, out):
        blocks = len(x) // BLOCK
        target = room.ctypes.data
        starts = target + 4 * len(x)
        units = starts + 8 * blocks
        room[-1] = spread(x.ctypes.data, target, starts, blocks, BLOCK)
        tile(target, 0, starts, units, data, out.ctypes.data, 0, blocks, BLOCK)

    weight = packed("nibbles" if bits == 4 else "bytes", 16, 3 * BLOCK)
    x, out = randn(1, 3 * BLOCK, seed=1), randn(1, 16, seed=2)
    matrix = weight.matrix()
    exact = out.double() + x.double() @ matrix.double()
    largest = x.abs().double() @ matrix.abs().double()
    room = np.zeros(3 * BLOCK + 2 * 3 + 1, np.float32)
    run(x[0].numpy(), room, weight.data.data_ptr(), out.numpy())
    assert ((out.double() - exact).abs() <= 2**-20 * largest).all()
