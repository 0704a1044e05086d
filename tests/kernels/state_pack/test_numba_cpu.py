from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.kernels.state_pack import numba_cpu, reference
from heddle.kernels.state_pack.reference import Grid
from tests.kernels.bounds import randn

GRIDS = st.builds(Grid, st.integers(1, 3), st.integers(1, 3), st.booleans())


@given(GRIDS, st.integers(0, 3), st.integers(1, 3), st.sampled_from([1, 8, 20]), st.booleans())
def test_moves_bits_as_the_reference_does(grid, rows, lanes, width, has_gaps):
    all_rows = rows if grid.is_copy else rows * grid.num_replicas
    shape = (all_rows, lanes * grid.slice_size, width)
    wide = randn(shape[0], shape[1], width + 3, seed=rows)
    out = wide[..., :width] if has_gaps else wide[..., :width].contiguous()
    lse = wide[..., -1] if has_gaps else wide[..., -1].contiguous()
    found = numba_cpu.pack(out, lse, grid)
    assert torch.equal(found, reference.pack(out, lse, grid))
    assert torch.equal(numba_cpu.pack(out.double(), lse.double(), grid), found.double())


def test_threads_do_not_change_a_bit():
    out, lse, grid = randn(200, 18, 64, seed=1), randn(200, 18, seed=2), Grid(2, 2, False)
    for num_threads in (1, 2, 3):
        found = numba_cpu.pack(out, lse, grid, num_threads=num_threads)
        assert torch.equal(found, reference.pack(out, lse, grid))
