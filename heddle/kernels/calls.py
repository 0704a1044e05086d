"""How a wrapper in Python meets compiled code: what it asks of tensors, and the call itself.

A decode step makes a hundred of these calls on rows of some hundred elements, so what surrounds the
loops counts in single microseconds.
"""

from __future__ import annotations

from array import array

import torch

from heddle.kernels.threads import launch

MIN_SHARE = 1 << 14
"""Elements that are worth waking a thread for: it takes some microseconds."""


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
    worth = min(num_threads, num_elements // MIN_SHARE)
    launch(address, array("q", words), worth if worth > 1 else 1)
