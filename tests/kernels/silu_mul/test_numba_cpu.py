from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.silu_mul import numba_cpu, reference
from tests.kernels.bounds import assert_as_close, randn


@given(
    st.integers(0, 5),
    st.sampled_from([1, 4, 8, 24, 96]),
    st.sampled_from([1e-3, 1.0, 20.0]),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_equals_the_reference(rows, width, scale, seed):
    gate_up = randn(rows, 2 * width, seed=seed, scale=scale)
    before, exact = gate_up.clone(), reference.silu_mul(gate_up.double())
    assert_as_close(numba_cpu.silu_mul(gate_up), reference.silu_mul(gate_up), exact)
    assert torch.equal(gate_up, before)


def test_far_gates_are_open_or_shut():
    gate = torch.tensor([1e30, 100.0, 88.0, -88.0, -100.0, -1e30, torch.inf, 0.0])
    found = numba_cpu.silu_mul(torch.cat([gate, torch.ones(8)])[None])[0]
    assert torch.equal(found[:3], gate[:3])
    assert (found[3:6].abs() < 1e-35).all()
    assert found[6:].tolist() == [torch.inf, 0.0]


def test_nan_stays_where_it_is():
    gate_up = randn(2, 32, seed=1)
    gate_up[0, 3], gate_up[1, 20] = torch.nan, torch.nan
    expected = torch.zeros(2, 16, dtype=torch.bool)
    expected[0, 3] = expected[1, 4] = True
    assert torch.equal(numba_cpu.silu_mul(gate_up).isnan(), expected)


def test_threads_do_not_change_a_bit():
    gate_up = randn(100, 2 * 1536, seed=1)
    one = numba_cpu.silu_mul(gate_up)
    for num_threads in (1, 2, 3):
        assert torch.equal(numba_cpu.silu_mul(gate_up, num_threads=num_threads), one)


@pytest.mark.parametrize(
    "gate_up",
    [
        randn(4, 40, seed=1)[:, :32],
        randn(3, 32, seed=1).double(),
        randn(3, 32, seed=1).bfloat16(),
        randn(2, 3, 32, seed=1),
    ],
)
def test_other_dtypes_and_strides(gate_up):
    found, expected = numba_cpu.silu_mul(gate_up), reference.silu_mul(gate_up)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
