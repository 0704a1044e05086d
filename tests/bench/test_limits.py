from __future__ import annotations

import pytest
import torch

from heddle.bench.limits import Limits


def test_rates_are_bytes_and_operations_over_seconds():
    limits = Limits(read_bytes=4096, matrix_size=8)
    rates = limits.rates({"read": 0.5, "gemm": 0.25})
    assert rates == {"read_bytes_per_second": 8192.0, "gemm_flops": 4 * 2 * 8**3}


def test_the_calls_read_everything_and_multiply_squares():
    calls = Limits(read_bytes=4096, matrix_size=8).calls
    assert list(calls) == ["read", "gemm"]
    total, product = calls["read"](), calls["gemm"]()
    assert isinstance(total, torch.Tensor)
    assert total.item() == pytest.approx(1024)
    assert isinstance(product, torch.Tensor)
    assert product.shape == (8, 8)
