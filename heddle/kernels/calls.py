"""How a wrapper in Python meets compiled code: what it asks of tensors, and the call itself.

A decode step makes a hundred of these calls on rows of some hundred elements, so what surrounds the
loops counts in single microseconds.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache

import torch

from heddle.kernels.threads import launch

MIN_SHARE = 1 << 14
"""Elements that are worth waking a thread for: it takes some microseconds."""
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is float32 in the memory of the host, in order and without gaps."""
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def call(address: int, words: tuple[int, ...], num_elements: int, num_threads: int) -> None:
    """Run a kernel on as many threads as the work is worth, at most `num_threads`.

    Args:
        address: of an entry.
        words: what it is given.
        num_elements: that it reads or writes.
        num_threads: at least 1.
    """
    given = array("q", words)
    if num_threads == 1 or num_elements < 2 * MIN_SHARE:
        _direct(address)(given.buffer_info()[0])
    else:
        launch(address, given, min(num_threads, num_elements // MIN_SHARE))


@cache
def _direct(address: int) -> ctypes._CFuncPtr | ctypes._FuncPointer:  # type: ignore[name-defined]
    """An entry as a function: outside of a team a thread is alone in its own."""
    return _KERNEL(address)
