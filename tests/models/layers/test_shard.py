"""Cuts tile the dimension, whatever its size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.models.layers.shard import cut


@given(count=st.integers(0, 200), size=st.integers(1, 17))
def test_cuts_tile_and_differ_by_at_most_one(count: int, size: int) -> None:
    spans = [cut(count, size, rank) for rank in range(size)]
    assert [unit for start, end in spans for unit in range(start, end)] == list(range(count))
    lengths = [end - start for start, end in spans]
    assert max(lengths) - min(lengths) <= 1


@given(heads=st.integers(1, 40), width=st.integers(1, 9), size=st.integers(1, 8))
def test_a_cut_is_the_floor_of_the_share(heads: int, width: int, size: int) -> None:
    assert [cut(heads * width, size, rank)[0] for rank in range(size)] == [
        int(heads * width * rank / size + 1e-9) for rank in range(size)
    ]
