"""Cuts tile the units, whatever their number, and finer cuts keep the coarse ones."""

from __future__ import annotations

from fractions import Fraction
from math import floor

from hypothesis import given
from hypothesis import strategies as st

from heddle.layout.cut import cut


@given(count=st.integers(0, 200), size=st.integers(1, 17))
def test_parts_tile_and_differ_by_at_most_one(count: int, size: int) -> None:
    spans = [cut(count, size, index) for index in range(size)]
    assert [unit for start, end in spans for unit in range(start, end)] == list(range(count))
    lengths = [end - start for start, end in spans]
    assert max(lengths) - min(lengths) <= 1


@given(count=st.integers(0, 400), size=st.integers(1, 9))
def test_a_part_starts_at_the_floor_of_its_share(count: int, size: int) -> None:
    starts = [cut(count, size, index)[0] for index in range(size)]
    assert starts == [floor(Fraction(count * index, size)) for index in range(size)]


@given(count=st.integers(0, 200), size=st.integers(1, 6), times=st.integers(1, 4))
def test_a_finer_cut_refines_a_coarse_one(count: int, size: int, times: int) -> None:
    for index in range(size):
        parts = [cut(count, size * times, index * times + k) for k in range(times)]
        assert (parts[0][0], parts[-1][1]) == cut(count, size, index)
