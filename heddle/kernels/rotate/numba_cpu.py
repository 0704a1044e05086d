"""Head norm, rotation and packing on a CPU, in one pass over the product.

Heads of float32, contiguous, with cosines and sines of float32; others go to the reference.

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
from heddle.kernels.rotate import reference
from heddle.kernels.rotate.reference import HeadNorm, Turns


@inner
def _move(head, out, width):
    source = numba.carray(pointer(head), (width,), np.float32)
    target = numba.carray(pointer(out), (width,), np.float32)
    for i in range(width):
        target[i] = source[i]


@inner
def _norm(head, weight, out, width, eps):
    source = numba.carray(pointer(head), (width,), np.float32)
    weights = numba.carray(pointer(weight), (width,), np.float32)
    target = numba.carray(pointer(out), (width,), np.float32)
    total = np.float32(0)
    for i in range(width):
        total += source[i] * source[i]
    factor = np.float32(1 / np.sqrt(np.float64(total) / width + eps))
    for i in range(width):
        target[i] = source[i] * factor * weights[i]


@inner
def _turn(head, cosines, sines, pairs, is_interleaved):
    """Turn one head in place."""
    x = numba.carray(pointer(head), (2 * pairs,), np.float32)
    cos = numba.carray(pointer(cosines), (pairs,), np.float32)
    sin = numba.carray(pointer(sines), (pairs,), np.float32)
    if is_interleaved:
        for j in range(pairs):
            a, b = x[2 * j], x[2 * j + 1]
            x[2 * j] = a * cos[j] - b * sin[j]
            x[2 * j + 1] = b * cos[j] + a * sin[j]
    else:
        for j in range(pairs):
            a, b = x[j], x[j + pairs]
            x[j] = a * cos[j] - b * sin[j]
            x[j + pairs] = b * cos[j] + a * sin[j]


@entry
def _rotate(address):
    """Words: heads, query, rows, cos, sin, weight or 0, M, h, Ks, D, P, is_interleaved, eps."""
    w = given(address, 13)
    lanes, keys, width, pairs = w[7], w[8], w[9], w[10]
    eps = as_real(w[12])
    first, end = share(w[6], thread_index(), num_threads())
    for row in range(first, end):
        cos, sin = w[3] + 4 * row * pairs, w[4] + 4 * row * pairs
        heads = w[0] + 4 * row * (lanes + 2 * keys) * width
        for head in range(lanes + keys):
            source = heads + 4 * head * width
            if head < lanes:
                target = w[1] + 4 * (row * lanes + head) * width
            else:
                target = w[2] + 8 * (row * keys + head - lanes) * width
                _move(source + 4 * keys * width, target + 4 * width, width)
            if w[5] != 0:
                _norm(source, w[5] + 4 * head * width, target, width, eps)
            else:
                _move(source, target, width)
            _turn(target, cos, sin, pairs, w[11] != 0)


def rotate(
    heads: torch.Tensor,
    num_lanes: int,
    turns: Turns,
    norm: HeadNorm | None = None,
    *,
    num_threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.rotate`."""
    cos, sin, interleaved = turns
    num_rows, num_heads, width = heads.shape
    if not (
        is_plain(heads)
        and is_plain(cos)
        and is_plain(sin)
        and (norm is None or is_plain(norm.weight))
    ):
        return reference.rotate(heads, num_lanes, turns, norm)
    num_keys = (num_heads - num_lanes) // 2
    query = torch.empty(num_rows, num_lanes, width)
    rows = torch.empty(num_rows, num_keys, 2 * width)
    words = (
        heads.data_ptr(),
        query.data_ptr(),
        rows.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        0 if norm is None else norm.weight.data_ptr(),
        num_rows,
        num_lanes,
        num_keys,
        width,
        cos.shape[-1],
        int(interleaved),
        0 if norm is None else _word(norm.eps),
    )
    call(_rotate, words, heads.numel(), num_threads)
    return query, rows


_word = cache(real_word)
