from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.kernels.sampling.reference import draw_token, ordered_prefix

values = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=1, max_size=300)


def reference_order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@given(values, st.integers(0, 320))
def test_prefix_is_logit_descending_then_id_ascending(row: list[float], count: int) -> None:
    found = ordered_prefix(np.array(row, dtype=np.float32), count).tolist()
    assert len(found) >= min(count, len(row))
    assert found == reference_order(row)[: len(found)]


def reference_draw(
    row: list[float], top_k: int, top_p: float, min_p: float, u: float
) -> int | None:
    """The documented rule, step by step over the whole vocabulary, in plain Python."""
    best = max(row)
    if best == -math.inf:
        return None
    order = reference_order(row)
    weight = {i: math.exp(row[i] - best) for i in order}
    weight = {i: w if w >= min_p else 0.0 for i, w in weight.items()}
    kept = order[:top_k] if top_k > 0 else order
    if top_p < 1.0:
        target, reached, prefix = top_p * sum(weight[i] for i in kept), 0.0, []
        for i in kept:
            prefix.append(i)
            reached += weight[i]
            if reached >= target:
                break
        kept = prefix
    target, cumulative = u * sum(weight[i] for i in kept), 0.0
    for i in kept:
        cumulative += weight[i]
        if cumulative > target:
            return i
    raise AssertionError("unreachable for u < 1")


rows = st.lists(
    st.one_of(st.floats(-8, 8, width=32), st.sampled_from([-math.inf, 0.0, 1.0])),
    min_size=1,
    max_size=900,
)


@given(
    rows,
    st.sampled_from([0, -1, 1, 2, 5, 64, 65, 300]),
    st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    st.sampled_from([0.0, 1e-3, 0.25, 1.0]),
    st.integers(0, 2**53 - 1),
)
def test_draw_equals_the_plain_rule(
    row: list[float], top_k: int, top_p: float, min_p: float, bits: int
) -> None:
    # Bits far from a boundary of the sums: two correct float64 sums differ in the last place.
    uniform = (bits >> 24) * 2.0**-29 + 2.0**-31
    found = draw_token(
        np.array(row, dtype=np.float64), top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform
    )
    assert found == reference_draw(row, top_k, top_p, min_p, uniform)


def test_literal_draws() -> None:
    # Masses 1/2, 1/4, 1/8, 1/8 in the order 2, 0, 1, 3.
    row = np.log(np.array([0.25, 0.125, 0.5, 0.125]))

    def draw(uniform: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> int | None:
        return draw_token(row, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)

    assert [draw(u) for u in (0.0, 0.49, 0.51, 0.74, 0.76, 0.874, 0.876, 0.999)] == [
        2, 2, 0, 0, 1, 1, 3, 3,
    ]  # fmt: skip
    assert [draw(u, top_k=2) for u in (0.66, 0.67, 0.999)] == [2, 0, 0]
    assert [draw(u, top_p=0.7) for u in (0.66, 0.67, 0.999)] == [2, 0, 0]
    assert [draw(u, min_p=0.4) for u in (0.66, 0.67, 0.999)] == [2, 0, 0]
    # top_p counts what top_k left: 0.6 of 3/4 is reached by the first alone.
    assert draw(0.999, top_k=2, top_p=0.6) == 2


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.4])
@pytest.mark.parametrize("uniform", [0.01, 0.3, 0.55, 0.8, 0.999])
def test_flat_rows_are_decided_far_down_the_order(uniform: float, top_p: float) -> None:
    # Nearly equal masses: the draw lies far beyond any short prefix.
    row = (np.random.default_rng(1).permutation(700) * -1e-3).tolist()
    found = draw_token(np.array(row), top_k=0, top_p=top_p, min_p=0.0, uniform=uniform)
    assert found == reference_draw(row, 0, top_p, 0.0, uniform)


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    row = np.zeros(200)
    assert draw_token(row, top_k=2, top_p=1.0, min_p=0.0, uniform=0.999) == 1
    assert draw_token(row, top_k=150, top_p=1.0, min_p=0.0, uniform=0.999) == 149


def test_mass_must_exceed_the_draw() -> None:
    # Two equal masses: the first one reaches exactly one half, but does not exceed it.
    row = np.zeros(2)
    assert draw_token(row, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5 - 2**-53) == 0
    assert draw_token(row, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5) == 1


def test_no_permitted_id_gives_none() -> None:
    row = np.full(100, -np.inf)
    assert draw_token(row, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5) is None


def test_an_excluded_id_is_never_drawn() -> None:
    row = np.zeros(200)
    row[::2] = -np.inf
    found = {
        draw_token(row, top_k=0, top_p=1.0, min_p=0.0, uniform=u)
        for u in np.linspace(0, 1 - 2**-53, 400)
    }
    assert found == set(range(1, 200, 2))


@pytest.mark.parametrize("top_k", [0, 3])
def test_frequencies_follow_the_masses(top_k: int) -> None:
    masses = np.array([0.1, 0.4, 0.2, 0.3])
    count = 20_000
    drawn = Counter(
        draw_token(np.log(masses), top_k=top_k, top_p=1.0, min_p=0.0, uniform=(i + 0.5) / count)
        for i in range(count)
    )
    kept = [1, 3, 2] if top_k else [0, 1, 2, 3]
    total = masses[kept].sum()
    assert set(drawn) == set(kept)
    assert all(abs(drawn[i] / count - masses[i] / total) < 1e-3 for i in kept)
