"""The merge on a CPU: each row and lane by itself, states read where they lie.

States of float32 whose elements lie side by side, any other strides; others go to the reference.

Products are rounded before they are added, and added in ascending order, so that a merge of all
states here has the bits of a sum of terms that were weighed elsewhere.

Legend: see `reference`.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from heddle.kernels.calls import call
from heddle.kernels.compiled import entry, exp, given, num_threads, pointer, share, thread_index
from heddle.kernels.state_merge import reference

exactly = numba.njit(fastmath=False, error_model="numpy", boundscheck=False)
"""Says so: else a function takes over the freedoms of its caller."""
_INFINITY = np.float32(np.inf)


@exactly
def _is_seen(lse, seen):
    """Whether a state saw a key: what a byte at `seen` says, or its lse where there is none."""
    if seen != 0:
        return numba.carray(pointer(seen), (1,), np.uint8)[0] != 0
    return lse != -_INFINITY


@exactly
def _weights(lses, lse_step, seen, seen_step, found):
    """Fill in the weight of each state, NaN in all that saw keys if one of them is broken.

    Returns:
        The lse of the union: -inf where nothing was seen.
    """
    peak = -_INFINITY
    for x in range(len(found)):
        lse = numba.carray(pointer(lses + x * lse_step), (1,), np.float32)[0]
        found[x] = -_INFINITY
        if _is_seen(lse, seen + x * seen_step):
            found[x] = lse if abs(lse) < _INFINITY else np.float32(np.nan)
            if not found[x] <= peak:  # NaN passes
                peak = found[x]
            if peak != peak:
                break
    if peak == -_INFINITY or peak != peak:
        found[:] = np.float32(0) if peak == peak else peak
        return peak
    total = np.float32(0)
    for x in range(len(found)):
        found[x] = exp(found[x] - peak)
        total += found[x]
    for x in range(len(found)):
        found[x] /= total
    return peak + np.float32(np.log(total))


@exactly
def _add(target, weight, out, width):
    values = numba.carray(pointer(out), (width,), np.float32)
    sums = numba.carray(pointer(target), (width,), np.float32)
    for i in range(width):
        sums[i] += weight * values[i]


@exactly
def _put(target, weight, out, width):
    values = numba.carray(pointer(out), (width,), np.float32)
    terms = numba.carray(pointer(target), (width,), np.float32)
    for i in range(width):
        terms[i] = weight * values[i]


@exactly
def _clear(target, width):
    numba.carray(pointer(target), (width,), np.float32)[:] = 0


@entry
def _merge(address):
    """Words: outs, lses, visible or 0, out, lse, X, R, h, Dv, index, then bytes between states,
    rows and lanes of outs, lses and visible. With an index, `outs` is that state alone.
    """
    w = given(address, 19)
    lanes, width, index = w[7], w[8], w[9]
    found = np.empty(w[5], np.float32)
    first, end = share(w[6] * lanes, thread_index(), num_threads())
    for place in range(first, end):
        row, lane = place // lanes, place % lanes
        lses, seen = w[1] + row * w[14] + lane * w[15], w[2] + row * w[17] + lane * w[18]
        lse = numba.carray(pointer(w[4] + 4 * place), (1,), np.float32)
        lse[0] = _weights(lses, w[13], seen, w[16], found)
        target = w[3] + 4 * place * width
        is_empty = True
        for x in range(0 if index < 0 else index, w[5] if index < 0 else index + 1):
            own = numba.carray(pointer(lses + x * w[13]), (1,), np.float32)[0]
            if not _is_seen(own, seen + x * w[16]):
                continue
            out = w[0] + row * w[11] + lane * w[12] + (x * w[10] if index < 0 else 0)
            if is_empty:
                _put(target, found[x], out, width)
            else:
                _add(target, found[x], out, width)
            is_empty = False
        if is_empty:
            _clear(target, width)


def merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    visible: torch.Tensor | None = None,
    *,
    num_threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.merge`."""
    if not _fits(outs, lses):
        return reference.merge(outs, lses, visible)
    return _run(outs, outs.stride()[:3], lses, visible, -1, num_threads)


def weigh(
    out: torch.Tensor,
    lses: torch.Tensor,
    visible: torch.Tensor | None,
    index: int,
    *,
    num_threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.weigh`."""
    if not _fits(out, lses):
        return reference.weigh(out, lses, visible, index)
    return _run(out, (0, *out.stride()[:2]), lses, visible, index, num_threads)


def _fits(outs: torch.Tensor, lses: torch.Tensor) -> bool:
    is_usual = outs.dtype is torch.float32 and outs.is_cpu and outs.stride(-1) == 1
    return is_usual and lses.dim() == 3


def _run(
    outs: torch.Tensor,
    steps: tuple[int, ...],
    lses: torch.Tensor,
    visible: torch.Tensor | None,
    index: int,
    num_threads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_states, num_rows, num_lanes = lses.shape
    width = outs.shape[-1]
    out, lse = torch.empty(num_rows, num_lanes, width), torch.empty(num_rows, num_lanes)
    seen = None if visible is None else visible.expand(lses.shape)
    words = (
        outs.data_ptr(),
        lses.data_ptr(),
        0 if seen is None else seen.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        num_states,
        num_rows,
        num_lanes,
        width,
        index,
        *[4 * step for step in steps],
        *[4 * step for step in lses.stride()],
        *((0, 0, 0) if seen is None else seen.stride()),
    )
    call(_merge, words, outs.numel(), num_threads)
    return out, lse
