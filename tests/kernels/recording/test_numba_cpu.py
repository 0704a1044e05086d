"""The entry that runs others: in order, each once per thread, all with their own words."""

from __future__ import annotations

import ctypes
from array import array

import pytest

from heddle.kernels.recording.numba_cpu import run_sequence
from heddle.kernels.threads import launch, runtime


@pytest.mark.parametrize("num_threads", [1, 2])
def test_entries_are_called_in_order_with_their_words(num_threads):
    seen: list[int] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda words: seen.append(ctypes.c_int64.from_address(words).value)
    )
    words = [array("q", [number]) for number in (5, 6, 7)]
    address = ctypes.cast(note, ctypes.c_void_p).value
    calls = array("q", [x for w in words for x in (address, w.buffer_info()[0])])
    launch(run_sequence, array("q", [3, calls.buffer_info()[0]]), num_threads)
    team = num_threads if runtime() is not None else 1
    assert seen == [number for number in (5, 6, 7) for _ in range(team)]
