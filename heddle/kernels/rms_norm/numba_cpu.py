"""The norm on a CPU: the residual is added, squares are summed and rows scaled while they lie in
the nearest cache.

Rows of float32, contiguous; others go to the reference.

Legend: see `reference`.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
import torch

from heddle.kernels.calls import call, is_plain
from heddle.kernels.compiled import (
    as_real,
    entry,
    given,
    inner,
    num_threads,
    pointer,
    real_word,
    share,
    thread_index,
)
from heddle.kernels.rms_norm import reference


@inner
def _add(x, residual, n):
    row = numba.carray(pointer(x), (n,), np.float32)
    added = numba.carray(pointer(residual), (n,), np.float32)
    for i in range(n):
        row[i] += added[i]


@inner
def _sum_of_squares(x, n):
    row = numba.carray(pointer(x), (n,), np.float32)
    total = np.float32(0)
    for i in range(n):
        total += row[i] * row[i]
    return total


@inner
def _scale(x, weight, out, n, factor):
    given_row = numba.carray(pointer(x), (n,), np.float32)
    weights = numba.carray(pointer(weight), (n,), np.float32)
    row = numba.carray(pointer(out), (n,), np.float32)
    for i in range(n):
        row[i] = given_row[i] * factor * weights[i]


@entry
def _sum(address):
    """Words: x, residual, elements."""
    w = given(address, 3)
    first, end = share(w[2], thread_index(), num_threads())
    _add(w[0] + 4 * first, w[1] + 4 * first, end - first)


@entry
def _normalize(address):
    """Words: x, residual or 0, weight, its rows, out, rows, n, eps."""
    w = given(address, 8)
    n, row_bytes = w[6], 4 * w[6]
    first, end = share(w[5], thread_index(), num_threads())
    for row in range(first, end):
        x = w[0] + row * row_bytes
        if w[1] != 0:
            _add(x, w[1] + row * row_bytes, n)
        mean = np.float64(_sum_of_squares(x, n)) / n + as_real(w[7])
        factor = np.float32(1 / np.sqrt(mean))
        _scale(x, w[2] + row % w[3] * row_bytes, w[4] + row * row_bytes, n, factor)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, num_threads: int = 1
) -> torch.Tensor:
    """See `reference.rms_norm`."""
    if not _fits(x, weight):
        return reference.rms_norm(x, weight, eps)
    return _run(x, 0, weight, eps, num_threads)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    num_threads: int = 1,
) -> torch.Tensor:
    """See `reference.add_rms_norm`."""
    if not (_fits(x, weight) and is_plain(residual) and residual.shape == x.shape):
        return reference.add_rms_norm(x, residual, weight, eps)
    return _run(x, residual.data_ptr(), weight, eps, num_threads)


def add(x: torch.Tensor, residual: torch.Tensor, *, num_threads: int = 1) -> torch.Tensor:
    """See `reference.add`."""
    if not (is_plain(x) and is_plain(residual) and residual.shape == x.shape):
        return reference.add(x, residual)
    size = x.numel()
    call(_sum, (x.data_ptr(), residual.data_ptr(), size), size, num_threads)
    return x


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if not (is_plain(x) and is_plain(weight)):
        return False
    met = weight.shape
    return x.shape[-len(met) :] == met and 0 not in met


def _run(
    x: torch.Tensor, residual: int, weight: torch.Tensor, eps: float, num_threads: int
) -> torch.Tensor:
    out = torch.empty_like(x)
    size, n = x.numel(), weight.shape[-1]
    words = (
        x.data_ptr(),
        residual,
        weight.data_ptr(),
        weight.numel() // n,
        out.data_ptr(),
        size // n,
        n,
        _word(eps),
    )
    call(_normalize, words, size, num_threads)
    return out


_word = cache(real_word)
