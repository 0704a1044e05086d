"""A kernel runs once in every thread of a team, and is told which one it is."""

from __future__ import annotations

import ctypes
from array import array

import numba
import numpy as np
import pytest
import torch
from numba import types

from heddle.kernels import threads
from heddle.kernels.compiled import given, num_threads, pointer, share, thread_index
from heddle.kernels.threads import launch, runtime, symbols


@numba.cfunc(types.void(types.voidptr))
def _sign(address):
    words = given(address, 2)
    signed = numba.carray(pointer(words[0]), (words[1], 2), np.int64)
    signed[thread_index(), 0] += 1
    signed[thread_index(), 1] = num_threads()


@pytest.mark.parametrize("team", [1, 2, 3])
def test_each_thread_of_a_team_runs_a_kernel_once(team: int) -> None:
    assert runtime() is not None, "torch on Linux brings an OpenMP runtime"
    signed = torch.zeros(4, 2, dtype=torch.int64)
    for round_number in (1, 2):
        launch(_sign.address, array("q", (signed.data_ptr(), 4)), team)
        assert signed[:, 0].tolist() == [round_number] * team + [0] * (4 - team)
    assert signed[:team, 1].tolist() == [team] * team


def test_without_a_runtime_a_kernel_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "runtime", lambda: None)
    assert set(symbols()) == {"omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"}
    asked = {
        name: ctypes.PYFUNCTYPE(ctypes.c_int)(address)() for name, address in symbols().items()
    }
    assert asked == {"omp_get_thread_num": 0, "omp_get_num_threads": 1, "GOMP_barrier": 0}
    signed = torch.zeros(1, 2, dtype=torch.int64)
    words = array("q", (signed.data_ptr(), 1))
    threads._call_alone(_sign.address, words.buffer_info()[0], 5, 0)
    assert signed[0].tolist() == [1, 1]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 100])
def test_shares_tile_the_work_and_differ_by_at_most_one(count: int, parts: int) -> None:
    found = [share.py_func(count, index, parts) for index in range(parts)]
    assert [end for _, end in found[:-1]] == [first for first, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (0, count)
    sizes = [end - first for first, end in found]
    assert max(sizes) - min(sizes) <= 1
