from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.state_merge import numba_cpu, reference
from tests.kernels.bounds import assert_as_close, randn


def draw_states(states, rows, lanes, width, seed):
    """States packed with their lse, as an exchange brings them; some saw nothing and hold NaN."""
    blocks = randn(states, rows, lanes, width + 1, seed=seed)
    blocks[..., -1] *= 8
    blind = randn(states, rows, lanes, seed=seed + 1) < -0.5
    blind[:, :1] |= randn(1, 1, lanes, seed=seed + 2) < 0  # seen by no state
    blocks[..., :-1] = blocks[..., :-1].masked_fill(blind[..., None], math.nan)
    return blocks[..., :-1], blocks[..., -1], ~blind


CASES = {
    "states": st.integers(1, 5),
    "rows": st.integers(0, 3),
    "lanes": st.integers(1, 5),
    "width": st.sampled_from([16, 20, 64]),
    "seed": st.integers(0, 999),
}


@given(**CASES)
@settings(max_examples=40)
def test_equals_the_reference(states, rows, lanes, width, seed):
    outs, lses, seen = draw_states(states, rows, lanes, width, seed)
    empty = lses.masked_fill(~seen, -math.inf)
    plain = reference.merge(outs, empty)
    exact = reference.merge(outs.double(), empty.double())
    # A mask says what was seen; the lse of what was not may be anything.
    masked = numba_cpu.merge(outs, lses.masked_fill(~seen, math.nan), seen)
    nothing = ~seen.any(0)
    for found in (numba_cpu.merge(outs, empty), masked):
        assert (found[0][nothing] == 0).all()
        assert (found[1][nothing] == -math.inf).all()
        for one, other, wide in zip(found, plain, exact, strict=True):
            assert_as_close(one[~nothing], other[~nothing], wide[~nothing])


def test_a_mask_of_rows_is_spread_over_lanes():
    outs, lses, _ = draw_states(3, 4, 2, 8, 1)
    outs = outs.nan_to_num(1.0)
    seen = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 0, 1]]).bool()[..., None]
    found, expected = numba_cpu.merge(outs, lses, seen), reference.merge(outs, lses, seen)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_what_was_seen_and_is_not_finite_makes_its_row_nan():
    for fault in (math.nan, math.inf, -math.inf):
        outs, lses = randn(3, 4, 1, 8, seed=1), randn(3, 4, 1, seed=2)
        lses[1, 2] = fault
        outs[2, 1, 0, 5] = math.nan
        out, lse = numba_cpu.merge(outs, lses, torch.ones(3, 1, 1, dtype=torch.bool))
        assert out[2].isnan().all()
        assert lse.isnan()[:, 0].tolist() == [False, False, True, False]
        expected = torch.zeros(8, dtype=torch.bool)
        expected[5] = True
        assert torch.equal(out[1, 0].isnan(), expected)
        assert out[[0, 3]].isfinite().all()


def test_threads_do_not_change_a_bit_and_float64_goes_to_the_reference():
    outs, lses = randn(2, 300, 9, 64, seed=1), randn(2, 300, 9, seed=2)
    one = numba_cpu.merge(outs, lses)
    for num_threads in (1, 2, 3):
        found = numba_cpu.merge(outs, lses, num_threads=num_threads)
        assert all(torch.equal(a, b) for a, b in zip(found, one, strict=True))
    wide = numba_cpu.merge(outs.double(), lses.double())
    expected = reference.merge(outs.double(), lses.double())
    assert all(torch.equal(a, b) for a, b in zip(wide, expected, strict=True))


@given(**CASES)
@settings(max_examples=20)
def test_weighed_terms_add_up_to_the_merge_bit_for_bit(states, rows, lanes, width, seed):
    outs, lses, seen = draw_states(states, rows, lanes, width, seed)
    out, lse = numba_cpu.merge(outs, lses, seen)
    terms = [numba_cpu.weigh(outs[i], lses, seen, i) for i in range(states)]
    assert torch.equal(sum(term for term, _ in terms), out)
    assert all(torch.equal(found, lse) for _, found in terms)
    wide = reference.weigh(outs[0].double(), lses.double(), seen, 0)
    plain = reference.weigh(outs[0], lses, seen, 0)
    nothing = ~seen.any(0)
    for one, other, exact in zip(terms[0], plain, wide, strict=True):
        assert_as_close(one[~nothing], other[~nothing], exact[~nothing])
    found = numba_cpu.weigh(outs[0].double(), lses.double(), seen, 0)
    assert all(torch.equal(one, other) for one, other in zip(found, wide, strict=True))
