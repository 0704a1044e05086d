from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.bench.laws import fit_law, power

SIZES = np.array([1.0, 2.0, 4.0, 8.0])
TERMS = np.stack([np.ones(4), SIZES, SIZES**2], axis=1)
constant = st.floats(1e-6, 1e3)


@given(constant, constant, constant)
def test_constants_of_an_exact_law_are_found(fixed, linear, square):
    law = fit_law(TERMS, TERMS @ [fixed, linear, square])
    assert law.worst_deviation < 1e-9
    np.testing.assert_allclose(law.seconds(TERMS), TERMS @ [fixed, linear, square], rtol=1e-9)


def test_errors_are_relative_ones():
    # Twice as much, at the short step or the long one: the same law but for the scale.
    short = fit_law([[1.0], [1000.0]], [2.0, 1000.0])
    long = fit_law([[1.0], [1000.0]], [1.0, 2000.0])
    assert short.constants == pytest.approx(long.constants)
    assert short.worst_deviation == pytest.approx(long.worst_deviation)


def test_no_term_takes_less_than_no_time():
    falling = [4.0, 3.9, 3.7, 3.2]
    law = fit_law(TERMS, falling)
    assert law.constants[1:] == (0.0, 0.0)
    assert min(falling) < law.constants[0] < max(falling)


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=4))
def test_no_other_constants_come_nearer(seconds):
    law = fit_law(TERMS, seconds)

    def error(constants):
        return np.square(TERMS @ constants / seconds - 1).sum()

    best = np.array(law.constants)
    assert (best >= 0).all()
    for step in (*np.eye(3), *-np.eye(3), np.ones(3)):
        other = np.maximum(best + 1e-3 * step, 0)
        assert error(best) <= error(other) + 1e-12


def test_the_worst_deviation_is_that_of_the_law():
    law = fit_law([[1.0], [1.0]], [1.0, 1.5])
    assert law.worst_deviation == pytest.approx(
        max(abs(law.seconds([1.0]) / np.array([1.0, 1.5]) - 1))
    )


@pytest.mark.parametrize("exponent", [0, 1, 1.5, 2])
def test_a_power_is_recognised(exponent):
    assert power(list(SIZES), list(3 * SIZES**exponent)) == pytest.approx(exponent)
