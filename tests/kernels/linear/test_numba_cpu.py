"""A compiled product is the plain one, for any form of the weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.linear import numba_cpu, reference
from heddle.kernels.linear.base import Segments
from heddle.kernels.linear.panels import Panels
from heddle.kernels.linear.quantized import BytePanels, NibblePanels
from tests.kernels.bounds import randn

FORMS = ("floats", "bytes", "nibbles", "wide nibbles", "segments")
NUM_ORDERS = 8
ROWS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 13, 33, 200])


def check(x, weight, bias):
    """Against float64: twice what the plain product errs by, in the worst of some orders of its
    sum, for one sum alone may meet the number by chance.
    """
    matrix = weight.matrix()
    exact = x.double() @ matrix.double() + (0 if bias is None else bias.double())
    found = numba_cpu.linear(x, weight, bias)
    assert found.is_contiguous()
    assert found.shape == reference.linear(x, weight, bias).shape == exact.shape
    if exact.numel() == 0:
        return
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(matrix), generator=generator) for _ in range(NUM_ORDERS)]
    plain = [reference.linear(x[:, order], matrix[order], bias) for order in orders]
    error = max((one.double() - exact).abs().max() for one in plain)
    assert (found.double() - exact).abs().max() <= 2 * error + exact.abs().max() * 2**-23


def packed(form, num_outputs, num_inputs):
    """A weight of small numbers; inputs of quantised forms are multiples of 32."""
    if form == "floats":
        return Panels.of(randn(num_outputs, num_inputs, seed=1, scale=0.1))
    if form == "segments":
        sizes = (num_outputs // 3, num_outputs - num_outputs // 3)
        kinds = ("nibbles", "floats")
        return Segments(
            tuple(packed(k, size, num_inputs) for k, size in zip(kinds, sizes, strict=True))
        )
    if form == "bytes":
        weight = BytePanels.zeros(num_outputs, num_inputs, 32)
        weight.write(0, randn(num_outputs, num_inputs, seed=2, scale=0.1))
        return weight
    is_half = form == "nibbles"
    weight = NibblePanels.zeros(num_outputs, num_inputs, is_half=is_half)
    shape = (num_outputs, num_inputs // 32, 32)
    q = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(3))
    scales = randn(*shape[:2], seed=4, scale=0.01)
    weight.place(0, q, scales, scales * -7.5 + randn(*shape[:2], seed=5, scale=0.01))
    return weight


@given(st.sampled_from(FORMS), ROWS, st.integers(0, 50), st.integers(1, 20), st.booleans())
@settings(max_examples=120)
def test_equals_the_reference(form, rows, num_outputs, num_blocks, has_bias):
    num_inputs = 32 * num_blocks
    weight = packed(form, num_outputs, num_inputs)
    bias = randn(num_outputs, seed=6) if has_bias else None
    # Rows of a wider tensor, as slices of fused products are.
    x = randn(rows, num_inputs + 8, seed=rows)[:, 4:-4]
    check(x, weight, bias)


@given(ROWS, st.integers(0, 40), st.sampled_from([1, 2, 7, 100, 300, 1000]), st.booleans())
@settings(max_examples=60)
def test_floats_take_any_number_of_inputs(rows, num_outputs, num_inputs, has_bias):
    weight = packed("floats", num_outputs, num_inputs)
    bias = randn(num_outputs, seed=6) if has_bias else None
    x = randn(rows, num_inputs, seed=rows)
    check(x, weight, bias)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3, 400])
def test_threads_do_not_change_a_bit(form, rows):
    weight, x = packed(form, 100, 576), randn(rows, 576, seed=7)
    one = numba_cpu.linear(x, weight, num_threads=1)
    for num_threads in (1, 2, 3):
        assert torch.equal(numba_cpu.linear(x, weight, num_threads=num_threads), one)


def test_other_rows_do_not_change_a_bit_of_a_row():
    weight, x = packed("floats", 100, 576), randn(400, 576, seed=8)
    whole = numba_cpu.linear(x, weight)
    for count in (1, 2, 7, 64):
        assert torch.equal(numba_cpu.linear(x[:count], weight), whole[:count])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [2, 9])
def test_a_row_of_nan_stays_a_row(form, rows):
    weight, x = packed(form, 20, 64), randn(rows, 64, seed=9)
    x[1, 5] = torch.nan
    found = numba_cpu.linear(x, weight).isnan()
    assert found[1].all()
    assert found.sum() == 20


@pytest.mark.parametrize("form", ["bytes", "nibbles"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_rows_of_any_size_lose_nothing(form, rows, size):
    check(randn(rows, 96, seed=10) * size, packed(form, 20, 96), None)


@pytest.mark.parametrize("form", ["bytes", "nibbles"])
def test_a_process_may_have_subnormals_read_as_zeros(form):
    weight, x = packed(form, 20, 96), randn(2, 96, seed=11)
    expected = numba_cpu.linear(x, weight)
    torch.set_flush_denormal(True)
    try:
        check(x, weight, None)
        found = numba_cpu.linear(x, weight)
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(found, expected)


def test_what_is_not_float32_is_left_to_the_reference():
    weight = randn(7, 5, seed=1).double()
    x = randn(3, 5, seed=2).double()
    for held in (Panels.of(weight), weight.t()):
        # In float64 to the last digits but one; products over pads may be added up otherwise.
        torch.testing.assert_close(
            numba_cpu.linear(x, held), x @ weight.t(), rtol=1e-14, atol=1e-14
        )
    empty = Panels.of(torch.zeros(7, 0))
    assert torch.equal(numba_cpu.linear(torch.zeros(3, 0), empty), torch.zeros(3, 7))
