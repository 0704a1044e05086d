"""The compiled cache write against its reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.cache_write import reference
from heddle.kernels.cache_write.numba_cpu import write
from tests.kernels.cache_write.test_triton_gpu import CASES, SLOTS, draw

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


@given(**CASES, num_threads=st.integers(1, 3), dtype=st.sampled_from(DTYPES))
@settings(max_examples=30, deadline=None)
def test_rows_go_to_their_slots_and_others_nowhere(
    num_rows, heads, width, seed, num_threads, dtype
):
    rows, slots = draw(num_rows, heads, width, seed)
    rows = (rows * 50).to(dtype)
    expected = torch.full((SLOTS, heads, width), 7, dtype=dtype)
    pool = expected.clone()
    reference.write(expected, slots, rows)
    write(pool, slots, rows, num_threads=num_threads)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_rows_are_shared_by_threads(num_threads):
    rows = torch.randn(300, 2, 64)
    slots = torch.randperm(300)
    pool = torch.empty(300, 2, 64)
    write(pool, slots, rows, num_threads=num_threads)
    assert torch.equal(pool[slots], rows)


def test_other_types_and_strides_go_to_the_reference():
    rows = torch.randn(4, 2, 16)
    narrow, wide = torch.zeros(SLOTS, 2, 16, dtype=torch.bfloat16), torch.zeros(SLOTS, 2, 8)
    write(narrow, torch.arange(4), rows)
    assert torch.equal(narrow[:4], rows.bfloat16())
    write(wide, torch.arange(4), rows[..., ::2])
    assert torch.equal(wide[:4], rows[..., ::2])
