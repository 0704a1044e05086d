"""Combinations of options in which every pair of values occurs together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product


def all_pairs(options: Mapping[str, Sequence[object]]) -> set[tuple[tuple[str, object], ...]]:
    """Every pair of values of two different options."""
    return {
        ((a, x), (b, y))
        for a, b in combinations(options, 2)
        for x, y in product(options[a], options[b])
    }


def pairs_of(row: Mapping[str, object]) -> set[tuple[tuple[str, object], ...]]:
    """The pairs that one combination covers."""
    return set(combinations(row.items(), 2))


def pairwise(options: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Few combinations that cover all pairs; greedy, and the same every time."""
    open_pairs = all_pairs(options)
    rows = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    chosen: list[dict[str, object]] = []
    while open_pairs:
        best = max(rows, key=lambda row: len(pairs_of(row) & open_pairs))
        open_pairs -= pairs_of(best)
        chosen.append(best)
    return chosen
