from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from heddle.kernels.triton_math import dot_in_parts, num_parts, padded, tanh

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def tanh_kernel(given, found, block: tl.constexpr):
    places = tl.arange(0, block)
    tl.store(found + places, tanh(tl.load(given + places)))


@triton.jit
def dot_kernel(a, b, found, side: tl.constexpr, parts: tl.constexpr, upcast: tl.constexpr):
    places = tl.arange(0, side)[:, None] * side + tl.arange(0, side)[None, :]
    start = tl.full([side, side], 1.0, tl.float32)
    total = dot_in_parts(tl.load(a + places), tl.load(b + places), start, parts, upcast)
    tl.store(found + places, total)


def test_tanh_is_right_to_a_few_units_in_the_last_place(device):
    sizes = torch.logspace(-30, 2, 1022)
    given = torch.cat([-sizes, sizes, torch.tensor([0.0, 0.29999, 0.3, 0.30001])]).to(device)
    found = torch.empty_like(given)
    tanh_kernel[(1,)](given, found, 2048)
    exact = torch.tanh(given.double())
    error = (found.double() - exact).abs() / exact.abs().clamp(min=1e-300)
    assert error.max() <= 3 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", list(TYPES))
def test_products_in_parts_err_like_float32(device, dtype):
    """A cast of the left side to 16 bits would err some thousand times more."""
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(16, 16, generator=generator).to(device)
    b = torch.randn(16, 16, generator=generator).to(dtype).to(device)
    found = torch.empty_like(a)
    is_interpreted = device.type == "cpu"
    dot_kernel[(1,)](a, b, found, 16, num_parts(torch.float32, dtype), is_interpreted)
    exact = 1 + a.double() @ b.double()
    plain = (1 + a @ b.float()).double()
    limit = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= limit


def test_parts_carry_all_bits():
    assert [num_parts(torch.float32, dtype) for dtype in TYPES] == [1, 3, 3]
    assert [num_parts(torch.float16, dtype) for dtype in TYPES] == [1, 2, 1]
    assert [num_parts(dtype, dtype) for dtype in TYPES] == [1, 1, 1]


def test_sides_are_powers_of_two():
    for width in range(1, 70):
        side = padded(width, 4)
        assert side >= max(width, 4)
        assert side // 2 < max(width, 4)
        assert side & (side - 1) == 0
