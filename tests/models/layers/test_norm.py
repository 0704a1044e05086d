"""The norm equals its definition, in every dtype."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from heddle.kernels.rms_norm.reference import plain_norm
from heddle.models.layers.norm import RMSNorm


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float64, 1e-14),
        (torch.float32, 1e-6),
        (torch.bfloat16, 2**-7),  # two roundings of 8 bits
        (torch.float16, 2**-10),
    ],
)
@pytest.mark.parametrize("shape", [(12,), (2, 12)])
def test_rms_norm_equals_its_definition(
    dtype: torch.dtype, bound: float, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 12, generator=generator).to(dtype)
    weight = torch.randn(shape, generator=generator).to(dtype)
    before = x.clone()
    root = ((x.double() ** 2).sum(-1, keepdim=True) / 12 + 0.25).sqrt()
    expected = x.double() / root * weight.double()
    found = RMSNorm(weight, 0.25)(x)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= bound * expected.abs().max()
    assert torch.equal(x, before)


def test_rows_of_zeros_stay_zeros() -> None:
    norm = RMSNorm(torch.ones(4), 1e-6)
    assert torch.equal(norm(torch.zeros(3, 4)), torch.zeros(3, 4))
    assert norm(torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_weight_rounds_once_as_gemma_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    theirs = Gemma2RMSNorm(12, eps=0.25)
    with torch.no_grad():
        theirs.weight.normal_(generator=generator)
    x = (5 * torch.randn(40, 12, generator=generator)).to(dtype)
    ours = RMSNorm(theirs.weight.detach() + 1, 0.25)(x)
    assert ours.dtype == dtype
    with torch.no_grad():
        assert torch.equal(ours, theirs(x))


def test_the_plain_norm_leaves_its_input_alone() -> None:
    x = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    before = x.clone()
    root = ((x**2).sum(-1, keepdim=True) / 12 + 0.25).sqrt()
    assert (plain_norm(x, 0.25) - x / root).abs().max() < 1e-14
    assert torch.equal(x, before)
