from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from heddle.kernels.calls import MIN_SHARE, call, is_plain
from heddle.kernels.compiled import entry, given, num_threads, pointer, thread_index


@entry
def _sign(address):
    """Every thread writes in its place how many there are."""
    words = given(address, 1)
    places = numba.carray(pointer(words[0]), (8,), np.int64)
    places[thread_index()] = num_threads()


@pytest.mark.parametrize(
    ("num_elements", "most", "expected"),
    [
        (0, 4, 1),
        (2 * MIN_SHARE - 1, 4, 1),
        (2 * MIN_SHARE, 4, 2),
        (3 * MIN_SHARE, 4, 3),
        (100 * MIN_SHARE, 4, 4),
        (100 * MIN_SHARE, 1, 1),
    ],
)
def test_threads_are_woken_for_work_that_is_worth_it(num_elements, most, expected):
    places = np.zeros(8, dtype=np.int64)
    call(_sign, (places.ctypes.data,), num_elements, most)
    assert places.tolist() == [expected] * expected + [0] * (8 - expected)


def test_plain_is_float32_here_in_order_without_gaps():
    x = torch.zeros(4, 6)
    assert is_plain(x)
    assert is_plain(x[1:3])
    for other in (x.double(), x.t(), x[:, :3], torch.empty(4, 6, device="meta")):
        assert not is_plain(other)
