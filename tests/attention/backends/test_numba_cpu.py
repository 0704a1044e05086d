"""The backend of compiled kernels: rows met in place equal rows that were gathered first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from heddle.attention.backends import create_backend
from heddle.attention.backends.base import KeyRange, PagedBackend
from heddle.attention.backends.numba_cpu import MIN_TILED_LANES, NumbaBackend
from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.layout.heads import HeadRun

HEADS, WIDTH, BLOCK = 2, 8, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lanes", [2, MIN_TILED_LANES], ids=["few lanes", "many lanes"])
@pytest.mark.parametrize("rows_each", [1, 7])
def test_rows_met_in_place_equal_gathered_ones(
    dtype: torch.dtype, lanes: int, rows_each: int
) -> None:
    """Two sequences in scattered blocks, lanes of uneven runs and one that reads nothing."""
    generator = torch.Generator().manual_seed(lanes + rows_each)
    pool = torch.full((12 * BLOCK, HEADS, 2 * WIDTH), torch.nan, dtype=dtype)
    tables = np.array([[7, 2, 9, 0], [1, 11, 4, 5]])
    lengths = (15, 9)
    for table, length in zip(tables, lengths, strict=True):
        slots = table[np.arange(length) // BLOCK] * BLOCK + np.arange(length) % BLOCK
        pool[slots] = torch.randn(length, HEADS, 2 * WIDTH, generator=generator, dtype=dtype)
    num_rows = 2 * rows_each
    query = torch.randn(num_rows, lanes, WIDTH, generator=generator, dtype=dtype)
    runs = [HeadRun(0, 0, 1), HeadRun(1, 1, lanes - (lanes > 2))]
    table_of_row = np.repeat([0, 1], rows_each)
    end = np.concatenate([np.arange(n - rows_each, n) + 1 for n in lengths])
    first = np.maximum(end - 6, 0)
    plan = PagedPlan(tables, table_of_row, first, end, BLOCK)
    backend = NumbaBackend(num_threads=2)
    state = backend.attend_paged(query, pool, plan, RowWidths(8, 8, 8), runs, 0.4)
    oracle = create_backend("reference")
    for sequence, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        own = np.flatnonzero(table_of_row == sequence)
        slots = table[np.arange(length) // BLOCK] * BLOCK + np.arange(length) % BLOCK
        keys = pool[slots].double()
        expected = oracle.attend(
            query[own].double(),
            keys[..., :WIDTH],
            keys[..., WIDTH:],
            runs,
            KeyRange(first[own], end[own]),
            0.4,
        )
        bound = 1e-12 if dtype == torch.float64 else 3e-6
        assert torch.allclose(state.out[own].double(), expected.out, rtol=0, atol=bound)
        assert torch.allclose(state.lse[own].double(), expected.lse, rtol=0, atol=bound)


def test_ranges_are_cut_once_and_serve_every_layer() -> None:
    visible = KeyRange(np.zeros(3, dtype=np.int64), np.arange(1, 4))
    key = torch.randn(3, 1, WIDTH)
    backend = NumbaBackend()
    assert isinstance(backend, PagedBackend)
    for _ in range(2):
        backend.attend(torch.randn(3, 1, WIDTH), key, key, [HeadRun(0, 0, 1)], visible, 1.0)
        plans = list(visible.kept.values())
        assert len(plans) == 1
    backend.attend(torch.randn(3, 1, WIDTH), key, key, [HeadRun(0, 0, 1)], visible, 1.0)
    assert next(iter(visible.kept.values())) is plans[0]
