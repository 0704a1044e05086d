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
    """Few combinations that cover all pairs; greedy, and the same every time.

    Each combination starts from an open pair; every other option then takes the value that covers
    most open pairs with what is chosen already.
    """
    order = {name: index for index, name in enumerate(options)}
    open_pairs = all_pairs(options)
    chosen: list[dict[str, object]] = []
    while open_pairs:
        row = dict(min(open_pairs, key=repr))
        for name in options:
            if name not in row:
                row[name] = max(
                    options[name], key=lambda value: _gain(row, name, value, order, open_pairs)
                )
        row = {name: row[name] for name in options}
        open_pairs -= pairs_of(row)
        chosen.append(row)
    return chosen


def _gain(
    row: Mapping[str, object],
    name: str,
    value: object,
    order: Mapping[str, int],
    open_pairs: set[tuple[tuple[str, object], ...]],
) -> int:
    """Open pairs that a further value would cover."""
    pairs = (((other, row[other]), (name, value)) for other in row)
    return sum(tuple(sorted(pair, key=lambda item: order[item[0]])) in open_pairs for pair in pairs)
