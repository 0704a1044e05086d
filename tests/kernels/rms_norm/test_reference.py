from __future__ import annotations

import pytest
import torch

from heddle.kernels.rms_norm.reference import add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_sum_is_kept_and_its_norm_is_the_norm(dtype):
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 3, 5, 12, generator=generator).to(dtype)
    weight = torch.randn(12, generator=generator).to(dtype)
    total = x + residual
    found = add_rms_norm(x, residual, weight, 0.25)
    assert torch.equal(x, total)
    assert torch.equal(found, rms_norm(total, weight, 0.25))


def test_a_wider_weight_is_applied_before_the_rounding():
    x = torch.full((1, 2), 3.0, dtype=torch.bfloat16)
    weight = torch.full((2,), 1 + 2**-12)  # would vanish in bfloat16
    exact = x.float() / (9.0 + 0.25) ** 0.5 * weight
    assert torch.equal(rms_norm(x, weight, 0.25), exact.to(torch.bfloat16))
