from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.runner.draw import request_seed, uniform

# BLAKE2b-64 of the little-endian words, by another program; the top 53 bits over 2**53.
TABLE = [
    ((0, 0, 0), 2891389769238885931),
    ((11, 0, 0), 9454245650159883128),
    ((11, 0, 1), 14857854509444071362),
    ((11, 1, 0), 15611854690158149472),
    ((18446744073709551615, 3, 7), 4453620156301969016),
]


@pytest.mark.parametrize(("key", "word"), TABLE)
def test_draw_is_the_documented_hash(key: tuple[int, int, int], word: int) -> None:
    assert uniform(*key) == (word >> 11) / 2**53


@given(st.integers(-(2**63), 2**64), st.integers(0, 15), st.integers(0, 2**20))
def test_draw_lies_in_the_half_open_unit_interval(seed: int, choice: int, position: int) -> None:
    value = uniform(seed, choice, position)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed + 2**64, choice, position)


def test_each_coordinate_matters() -> None:
    values = {uniform(s, c, p) for s in range(8) for c in range(8) for p in range(8)}
    assert len(values) == 512


def test_draws_are_spread_evenly() -> None:
    values = [uniform(3, 0, position) for position in range(4000)]
    counts = [sum(i / 8 <= v < (i + 1) / 8 for v in values) for i in range(8)]
    # 500 expected in each eighth; five standard deviations are 105.
    assert all(abs(count - 500) < 105 for count in counts)


def test_request_seed_is_a_word_of_seed_and_ordinal() -> None:
    assert request_seed(5, 3) == 2064260787866576696
    assert len({request_seed(0, ordinal) for ordinal in range(1000)}) == 1000
