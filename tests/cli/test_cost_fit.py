"""Times made by the formula give the formula's constants back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.cli.cost_fit import fit_costs

SHARE = {"all_gather": 1.0, "reduce_scatter": 0.5, "all_reduce": 1.0, "all_to_all": 0.5}
"""Bytes that one of two ranks receives, over those that it puts in."""


def measured(alpha, beta, noise=1.0):
    return [
        {
            "op": op,
            "ranks": 2,
            "bytes": size,
            "seconds": (alpha + share * size / beta) * (noise if size > 5000 else 1.0),
        }
        for op, share in SHARE.items()
        for size in (4096, 1 << 20)
    ]


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e11))
def test_exact_times_give_exact_constants(alpha, beta):
    found = fit_costs(measured(alpha, beta), flops=3.0, memory=4.0)
    # Where bytes cost next to nothing, or calls do, rounding blurs the smaller of both.
    for value, expected, share in (
        (found.alpha, alpha, alpha / (alpha + 2048 / beta)),
        (1 / found.beta, 1 / beta, (1 << 20) / beta / (alpha + (1 << 20) / beta)),
    ):
        assert value == pytest.approx(expected, rel=1e-9 / share)
    assert (found.flops, found.memory) == (3.0, 4.0)


def test_small_calls_weigh_as_much_as_large_ones():
    """A tenth more on every large call must not be paid by the small ones."""
    found = fit_costs(measured(1e-4, 1e9, noise=1.1), flops=1.0, memory=1.0)
    assert found.alpha == pytest.approx(1e-4, rel=0.1)
    assert found.beta == pytest.approx(1e9, rel=0.15)


@pytest.mark.parametrize("seconds", [{4096: 1e-3, 1 << 20: 1e-4}, {4096: 1e-9, 1 << 20: 1e-2}])
def test_absurd_times_still_give_prices_above_zero(seconds):
    rows = [{**row, "seconds": seconds[row["bytes"]]} for row in measured(1.0, 1.0)]
    found = fit_costs(rows, flops=1.0, memory=1.0)
    assert found.alpha > 0
    assert found.beta > 0
