from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from heddle.attention.backends import torch_cpu
from heddle.attention.backends.base import KeyRange
from heddle.attention.backends.torch_cpu import TorchBackend
from heddle.layout.heads import HeadRun

RUNS = [HeadRun(0, 0, 2), HeadRun(1, 2, 4)]


def count_calls(monkeypatch, name):
    calls = []
    original = getattr(torch_cpu, name)

    def counted(*args, **options):
        calls.append(args)
        return original(*args, **options)

    monkeypatch.setattr(torch_cpu, name, counted)
    return calls


@pytest.mark.parametrize(
    ("visible", "flash_calls"),
    [
        (5, 1),  # a rectangle
        (np.array([1, 2, 3]), 1),  # a fresh prompt: one causal square
        (np.array([3, 4, 5]), 2),  # a rectangle and a square
        (np.array([0, 0, 0]), 0),
        (KeyRange(2, 5), 1),
        (KeyRange(2, np.array([3, 4, 5])), 1),  # the start of a chunk
        (KeyRange(1, np.array([3, 4, 5])), 2),
        (KeyRange(3, 3), 0),
    ],
)
def test_regular_rows_take_few_kernel_calls(monkeypatch, visible, flash_calls):
    flash, blocked = count_calls(monkeypatch, "flash"), count_calls(monkeypatch, "blocked")
    key = torch.randn(5, 2, 8)
    TorchBackend().attend(torch.randn(3, 4, 8), key, key, RUNS, visible, 1.0)
    assert len(flash) == flash_calls
    assert blocked == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_value_or_dtype_takes_matrix_products(monkeypatch, dtype):
    flash, blocked = count_calls(monkeypatch, "flash"), count_calls(monkeypatch, "blocked")
    key = torch.randn(5, 2, 8).to(dtype)
    value = key[..., :6] if dtype == torch.float32 else key
    TorchBackend().attend(torch.randn(3, 4, 8).to(dtype), key, value, RUNS, 5, 1.0)
    assert flash == []
    assert len(blocked) == 1


def attend_window(window, rows=200):
    key = torch.randn(rows, 2, 8)
    end = np.arange(1, rows + 1)
    ranges = KeyRange(np.maximum(end - window, 0), end)
    TorchBackend().attend(torch.randn(rows, 4, 8), key, key, RUNS, ranges, 1.0)


def test_a_narrow_window_is_a_causal_start_and_one_band(monkeypatch):
    flash, blocked = count_calls(monkeypatch, "flash"), count_calls(monkeypatch, "blocked")
    attend_window(40)
    assert [len(args[0]) for args in flash] == [40]
    assert [len(args[0]) for args in blocked] == [160]


def test_a_wide_window_computes_no_score_that_it_masks(monkeypatch):
    flash, blocked = count_calls(monkeypatch, "flash"), count_calls(monkeypatch, "blocked")
    attend_window(70)
    # The start; two squares of a full tile; two squares and a rectangle of the rest.
    shapes = [(len(args[0]), len(args[1])) for args in flash]
    assert shapes == [(70, 70), (69, 69), (69, 69), (61, 61), (61, 8), (61, 61)]
    assert blocked == []


def test_a_decode_row_of_a_window_takes_the_kernel(monkeypatch):
    flash, blocked = count_calls(monkeypatch, "flash"), count_calls(monkeypatch, "blocked")
    key = torch.randn(200, 2, 8)
    TorchBackend().attend(torch.randn(1, 4, 8), key, key, RUNS, KeyRange(130, 200), 1.0)
    assert [len(args[1]) for args in flash] == [70]
    assert blocked == []


def test_the_kernel_never_meets_a_soft_cap(monkeypatch):
    flash, blocked = count_calls(monkeypatch, "flash"), count_calls(monkeypatch, "blocked")
    key = torch.randn(5, 2, 8)
    TorchBackend().attend(torch.randn(3, 4, 8), key, key, RUNS, 5, 1.0, 2.0)
    assert flash == []
    assert len(blocked) == 1


@pytest.mark.parametrize("visible", [1, 3, np.array([1, 2, 3])])
def test_keys_that_are_all_nan_give_nan(visible):
    key = torch.full((3, 2, 8), math.nan)
    value = torch.ones(3, 2, 8)
    state = TorchBackend().attend(torch.randn(3, 4, 8), key, value, RUNS, visible, 1.0)
    assert state.out.isnan().all()
    assert state.lse.isnan().all()


@pytest.mark.parametrize("visible", [1, 2, np.array([1, 2, 3])])
def test_scores_of_zero_are_not_mistaken_for_no_keys(visible):
    key, value = torch.zeros(3, 2, 8), torch.full((3, 2, 8), 2.0)
    state = TorchBackend().attend(torch.zeros(3, 4, 8), key, value, RUNS, visible, 1.0)
    assert (state.out == 2).all()
    lengths = np.broadcast_to(visible, 3)
    np.testing.assert_allclose(state.lse[:, 0].numpy(), np.log(lengths), rtol=0, atol=1e-6)
