from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.rms_norm import numba_cpu, reference
from tests.kernels.bounds import assert_as_close, randn

EPS = 1e-5
SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from([7, 8, 64, 100]))


@given(SHAPES, st.booleans(), st.sampled_from([1e-3, 1.0, 1e4]), st.integers(0, 99))
@settings(max_examples=40)
def test_equals_the_reference(shape, is_per_head, scale, seed):
    x = randn(*shape, seed=seed, scale=scale)
    weight = randn(*shape[1 if is_per_head else 2 :], seed=seed + 100)
    before, exact = x.clone(), reference.rms_norm(x.double(), weight.double(), EPS)
    found = numba_cpu.rms_norm(x, weight, EPS)
    assert_as_close(found, reference.rms_norm(x, weight, EPS), exact)
    assert torch.equal(x, before)
    residual = randn(*shape, seed=seed + 200, scale=scale)
    total = x + residual
    exact = reference.rms_norm(total.double(), weight.double(), EPS)
    plain = reference.rms_norm(total, weight, EPS)
    assert_as_close(numba_cpu.add_rms_norm(x, residual, weight, EPS), plain, exact)
    assert torch.equal(x, total)


@given(SHAPES, st.integers(1, 3), st.booleans(), st.integers(0, 99))
@settings(max_examples=25)
def test_a_sum_is_made_in_place(shape, num_threads, is_wide, seed):
    x, residual = randn(*shape, seed=seed), randn(*shape, seed=seed + 1)
    if is_wide:
        x, residual = x.double(), residual.double()
    expected = x + residual
    assert numba_cpu.add(x, residual, num_threads=num_threads) is x
    assert torch.equal(x, expected)


def test_threads_do_not_change_a_bit():
    x, weight = randn(300, 576, seed=1), randn(576, seed=2)
    one = numba_cpu.rms_norm(x, weight, EPS)
    for num_threads in (1, 2, 3):
        assert torch.equal(numba_cpu.rms_norm(x, weight, EPS, num_threads=num_threads), one)


def test_zeros_stay_zeros_and_nan_stays_in_its_row():
    x = torch.stack([torch.zeros(16), torch.full((16,), torch.nan), randn(16, seed=1)])
    found = numba_cpu.rms_norm(x, torch.ones(16), EPS)
    assert (found[0] == 0).all()
    assert found[1].isnan().all()
    assert found[2].isfinite().all()


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (randn(4, 3, 8, seed=1)[:, :2], randn(8, seed=2)),
        (randn(8, 4, seed=1).t(), randn(8, seed=2)),
        (randn(4, 8, seed=1).double(), randn(8, seed=2).double()),
        (randn(4, 8, seed=1).bfloat16(), randn(8, seed=2)),
    ],
)
def test_what_has_no_compiled_form_goes_to_the_reference(x, weight):
    found, expected = numba_cpu.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)
    assert found.dtype == x.dtype
    assert torch.equal(found, expected)
    total = reference.add_rms_norm(x.clone(), x, weight, EPS)
    assert torch.equal(numba_cpu.add_rms_norm(x.clone(), x, weight, EPS), total)
