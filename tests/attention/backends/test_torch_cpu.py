from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from heddle.attention.backends import torch_cpu
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
