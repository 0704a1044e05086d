"""The gate on a CPU, in one pass.

Rows of float32 whose halves are multiples of 8, contiguous; others go to the reference. Gates below
-87 count as 0: what they let through is smaller than 1e-36.

Legend: see `reference`.
"""

from __future__ import annotations

import torch

from heddle.kernels import vectors
from heddle.kernels.calls import call, is_plain
from heddle.kernels.compiled import (
    entry,
    given,
    num_threads,
    share,
    thread_index,
)
from heddle.kernels.silu_mul import reference


@entry
def _gate(address):
    """Words: gate_up, out, rows, i."""
    w = given(address, 4)
    n = w[3]
    first, end = share(w[2], thread_index(), num_threads())
    for row in range(first, end):
        gate = w[0] + 8 * row * n
        vectors.silu_mul(gate, gate + 4 * n, w[1] + 4 * row * n, n)


def silu_mul(gate_up: torch.Tensor, *, num_threads: int = 1) -> torch.Tensor:
    """See `reference.silu_mul`."""
    *leading, width = gate_up.shape
    if not is_plain(gate_up) or width % (2 * vectors.LANES) or width == 0:
        return reference.silu_mul(gate_up)
    out = torch.empty((*leading, width // 2))
    size = out.numel()
    words = (gate_up.data_ptr(), out.data_ptr(), size * 2 // width, width // 2)
    call(_gate, words, size, num_threads)
    return out
