from __future__ import annotations

import pytest
import torch

from heddle.verify.oracles import Bound, Difference, Trace, compare, narrow_bound, wide_bound

BOUND = Bound(tolerance=0.01, tie_gap=1.0)


def trace(*rows):
    return Trace((0,) * len(rows), torch.tensor(rows, dtype=torch.float64))


def test_equal_runs_pass_and_ties_are_counted():
    golden = [trace([5.0, 1.0, 0.0], [5.0, 4.5, 0.0]), trace([0.0, 0.0, 9.0])]
    found = compare(golden, golden, BOUND)
    assert found.ok
    assert (found.max_abs_logit_diff, found.near_ties, found.num_steps) == (0.0, 1, 3)
    assert found.first_difference is None


def test_a_logit_beyond_the_tolerance_fails_even_if_tokens_agree():
    found = compare([trace([5.0, 1.0])], [trace([5.0, 1.02])], BOUND)
    assert found.tokens_equal
    assert not found.logits_close
    assert not found.ok
    assert found.max_abs_logit_diff == pytest.approx(0.02)


def test_a_wrong_token_away_from_a_tie_fails_and_is_named():
    golden = [trace([9.0, 0.0, 0.0]), trace([5.0, 0.0, 0.0], [0.0, 5.0, 3.9])]
    found = [trace([9.0, 0.0, 0.0]), trace([5.0, 0.0, 0.0], [0.0, 5.0, 5.1])]
    verdict = compare(golden, found, Bound(tolerance=2.0, tie_gap=1.0))
    assert verdict.logits_close
    assert not verdict.tokens_equal
    assert not verdict.ok
    assert verdict.first_difference == Difference(prompt=1, step=1, token_id=2, golden_token_id=1)


def test_at_a_tie_any_tied_token_passes_and_no_other():
    golden = [trace([0.0, 5.0, 4.5])]
    wide = Bound(tolerance=10.0, tie_gap=1.0)
    assert compare(golden, [trace([0.0, 5.0, 5.5])], wide).tokens_equal
    assert not compare(golden, [trace([6.0, 5.0, 4.5])], wide).tokens_equal


def test_nan_never_passes():
    nan = float("nan")
    golden = [trace([0.0, 5.0]), trace([0.0, 5.0])]
    for bad in ([trace([0.0, 5.0]), trace([0.0, nan])], [trace([0.0, nan]), trace([0.0, 5.0])]):
        found = compare(golden, bad, BOUND)
        assert found.tokens_equal
        assert not found.logits_close
        assert not found.ok


def test_runs_of_different_length_are_refused():
    with pytest.raises(ValueError, match="do not compare"):
        compare([trace([0.0, 1.0])], [trace([0.0, 1.0], [0.0, 1.0])], BOUND)


@pytest.mark.parametrize(
    ("dtype", "largest", "tolerance"),
    [
        ("float32", 0.5, 1e-5),
        ("float32", 40.0, 4e-4),
        ("float64", 0.5, 1e-10),
        ("float64", -20.0, 2e-9),
    ],
)
def test_a_wide_bound_scales_with_the_largest_logit(dtype, largest, tolerance):
    bound = wide_bound([trace([0.1, 0.2]), trace([0.0, largest])], dtype)
    assert bound.tolerance == pytest.approx(tolerance)
    assert bound.tie_gap == pytest.approx(100 * tolerance)


def test_a_narrow_bound_is_twice_the_error_of_one_rank():
    golden = [trace([1.0, 2.0]), trace([3.0, 4.0])]
    rounded = [trace([1.0, 2.25]), trace([2.5, 4.0])]
    bound = narrow_bound(golden, rounded)
    assert (bound.tolerance, bound.tie_gap) == (1.0, 2.0)
    error = bound.narrow_error
    assert (error.max_abs, error.other_tokens, error.num_steps) == (0.5, 0, 2)
    assert error.rms == pytest.approx((0.25**2 + 0.5**2) ** 0.5 / 2)
    other = narrow_bound(golden, [trace([2.5, 2.0]), trace([3.0, 4.0])]).narrow_error
    assert other.other_tokens == 1
    assert wide_bound(golden, "float32").narrow_error is None
