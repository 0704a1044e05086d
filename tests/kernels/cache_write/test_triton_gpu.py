"""The cache write in Triton against its reference, bit for bit, and against the store."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.row_codec import PlainRows
from heddle.attention.storage import KVStore, SlotWrite
from heddle.kernels.cache_write import reference

SLOTS = 24
CASES = {
    "num_rows": st.integers(0, 8),
    "heads": st.integers(1, 3),
    "width": st.sampled_from([8, 16, 72]),
    "seed": st.integers(0, 999),
}


def draw(num_rows, heads, width, seed, dtype=torch.float32):
    """Rows, and a slot for each of them or none."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, heads, width, generator=generator).to(dtype)
    slots = torch.randperm(SLOTS, generator=generator)[:num_rows]
    return rows, slots.masked_fill(torch.rand(num_rows, generator=generator) < 0.3, -1)


@given(**CASES)
@settings(max_examples=25)
def test_the_reference_writes_what_the_store_writes(num_rows, heads, width, seed):
    rows, slots = draw(num_rows, heads, width, seed)
    store = KVStore(
        tensor_of_layer={0: 0},
        num_blocks=SLOTS // 4,
        block_size=4,
        num_heads=heads,
        codec=PlainRows(width, torch.float32),
        device=torch.device("cpu"),
    )
    store.layer(0).fill_(math.nan)
    pool = store.layer(0).clone()
    store.write(0, SlotWrite.of(np.asarray(slots), store.num_slots), rows)
    reference.write(pool, slots, rows)
    assert torch.equal(pool.isnan(), store.layer(0).isnan())
    assert torch.equal(pool.nan_to_num(9e9), store.layer(0).nan_to_num(9e9))


@given(
    **CASES,
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float16),
        ]
    ),
)
@settings(max_examples=25)
def test_equals_the_reference_bit_for_bit(device, num_rows, heads, width, seed, dtypes):
    from heddle.kernels.cache_write import triton_gpu

    rows, slots = draw(num_rows, heads, width, seed, dtypes[0])
    expected = torch.full((SLOTS, heads, width), 7.0, dtype=dtypes[1])
    pool = expected.to(device)
    reference.write(expected, slots, rows)
    triton_gpu.write(pool, slots.to(device), rows.to(device))
    assert torch.equal(pool.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_rows_of_a_longer_tensor_and_bytes_are_moved_as_they_are(device, dtype):
    from heddle.kernels.cache_write import triton_gpu

    wide = (torch.arange(6 * 2 * 300).view(6, 300, 2) % 251).to(dtype)
    rows, slots = wide.transpose(1, 2)[..., 10:290].to(device), torch.tensor([3, -1, 0, 5, 4, 1])
    rows = torch.cat([rows, rows], dim=-1)[..., :280]  # holes between rows
    pool = torch.zeros(6, 2, 280, dtype=dtype, device=device)
    triton_gpu.write(pool, slots.to(device), rows)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(pool[slot], rows[row])
    assert (pool[2] == 0).all()
