"""Bits equal the reference's, whose meaning the tests of the codec state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.row_encode import numba_cpu, reference
from heddle.layout.cache_rows import RowFormat
from tests.kernels.bounds import randn

FORMATS = st.builds(
    RowFormat,
    st.sampled_from(["int8", "fp8_e4m3"]),
    st.sampled_from([(1,), (8, 8), (64, 64), (48, 16), (3, 5, 7)]),
)


@given(FORMATS, st.integers(0, 5), st.sampled_from([1e-40, 1e-3, 1.0, 3e38]), st.integers(0, 99))
@settings(max_examples=60)
def test_equals_the_reference_bit_for_bit(row_format, count, scale, seed):
    rows = randn(count, 2, sum(row_format.parts), seed=seed, scale=scale)
    assert torch.equal(numba_cpu.encode(rows, row_format), reference.encode(rows, row_format))


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_numbers_half_way_between_codes_go_to_the_even_one(dtype):
    peak = {"int8": 127.0, "fp8_e4m3": 448.0}[dtype]
    codes = torch.arange(256, dtype=torch.uint8)
    grid = codes.view(torch.int8 if dtype == "int8" else torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite() & (grid.abs() <= peak)].sort().values
    halves = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([peak, -0.0])])
    row_format = RowFormat(dtype, (len(halves),))
    for factor in (1.0, 0.5, 2.0**20):
        rows = (halves * factor)[None]
        assert torch.equal(numba_cpu.encode(rows, row_format), reference.encode(rows, row_format))


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_part_that_is_not_finite_is_told_by_its_scale(dtype, fault):
    row_format = RowFormat(dtype, (8, 8))
    rows = randn(3, 1, 16, seed=1)
    rows[1, 0, 3] = fault
    found = numba_cpu.encode(rows, row_format)
    assert torch.equal(found, reference.encode(rows, row_format))
    scales = found[..., 16:].contiguous().view(torch.float32)
    assert scales.isnan().tolist() == [[[False, False]], [[True, False]], [[False, False]]]


def test_threads_do_not_change_a_bit_and_other_rows_go_to_the_reference():
    row_format = RowFormat("int8", (64, 64))
    rows = randn(400, 3, 128, seed=1)
    expected = reference.encode(rows, row_format)
    for num_threads in (1, 2, 3):
        assert torch.equal(numba_cpu.encode(rows, row_format, num_threads=num_threads), expected)
    for other in (rows.double(), rows.bfloat16(), rows[:, 1:]):
        found = numba_cpu.encode(other, row_format)
        assert torch.equal(found, reference.encode(other, row_format))
