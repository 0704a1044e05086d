"""The cache write on a CPU: bytes of rows are moved to their slots.

Rows of the type of the pool, both contiguous; others go to the reference.

Legend: see `reference`.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from heddle.kernels.cache_write import reference
from heddle.kernels.calls import call
from heddle.kernels.compiled import entry, given, num_threads, pointer, share, thread_index
from heddle.units import PAD_SLOT_ID


@entry
def _write(address):
    """Words: pool, slot mapping, rows, R, bytes of a row."""
    w = given(address, 5)
    size = w[4]
    slots = numba.carray(pointer(w[1]), (w[3],), np.int64)
    first, end = share(w[3], thread_index(), num_threads())
    for row in range(first, end):
        if slots[row] != PAD_SLOT_ID:
            source = numba.carray(pointer(w[2] + row * size), (size,), np.uint8)
            target = numba.carray(pointer(w[0] + slots[row] * size), (size,), np.uint8)
            target[:] = source


def write(
    pool: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor, *, num_threads: int = 1
) -> None:
    """See `reference.write`."""
    is_moved = pool.dtype is rows.dtype and pool.is_cpu and rows.is_contiguous()
    if not (is_moved and pool.is_contiguous() and slot_mapping.is_contiguous()):
        reference.write(pool, slot_mapping, rows)
        return
    row_bytes = pool.stride(0) * pool.element_size()
    words = (pool.data_ptr(), slot_mapping.data_ptr(), rows.data_ptr(), len(rows), row_bytes)
    call(_write, words, rows.numel(), num_threads)
