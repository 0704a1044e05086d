"""Search for legal layouts near a refused one.

Each rule knows how to mend itself and nothing else. The search mends one broken rule after another,
keeps what the rules then accept, and sorts by how little was changed. It knows no rule, so a
proposal cannot disagree with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice
from heddle.layout.rule import Mend

_MAX_MENDS = 20
"""Mends in a row; more than there are settings, and a guard against mends that undo each other."""


def nearest_choices(
    asked: LayoutChoice, first_mend: Callable[[LayoutChoice], Mend | None], limit: int
) -> list[LayoutChoice]:
    """Legal choices near `asked`: fewest changed settings first, then the smallest change.

    Args:
        asked: a refused choice.
        first_mend: the mend of the first rule that a choice breaks; None: the choice is legal.
        limit: how many to return at most.
    """
    found: set[LayoutChoice] = set()
    seen = frontier = {asked}
    for _ in range(_MAX_MENDS):
        mended: set[LayoutChoice] = set()
        for choice in frontier:
            mend = first_mend(choice)
            if mend is None:
                found.add(choice)
            else:
                mended.update(mend(choice))
        frontier = mended - seen
        seen = seen | mended
    return sorted(found, key=lambda choice: _distance(asked, choice))[:limit]


def nearest_sizes(size: int, legal: Iterable[int], limit: int = 2) -> list[int]:
    """The legal sizes nearest to `size` by ratio, nearest first.

    Example:
        >>> nearest_sizes(3, [1, 2, 4, 8])
        [4, 2]
    """
    return sorted(legal, key=lambda other: (_ratio(size, other), other))[:limit]


def _distance(asked: LayoutChoice, choice: LayoutChoice) -> tuple[int, float, float, str]:
    """Changed settings, how far they moved, the change of the world; flags break ties."""
    before, after = asked.settings(), choice.settings()
    changed = [name for name in before if before[name] != after[name]]
    sizes = sum(_change(before[name], after[name]) for name in changed)
    world = _world_change(asked.parallel, choice.parallel)
    return len(changed), sizes, world, choice.flags(asked)


def _world_change(before: ParallelConfig, after: ParallelConfig) -> float:
    """How far the number of ranks moved; not at all from sizes that are no whole numbers."""
    sizes = (
        before.tensor_parallel_size,
        before.prefill_context_parallel_size,
        before.pipeline_parallel_size,
        before.data_parallel_size,
    )
    is_known = all(type(size) is int for size in sizes)
    return _ratio(before.world_size, after.world_size) if is_known else 0.0


def _change(before: object, after: object) -> float:
    """How far one setting moved; a name or a switch counts as much as a factor of e."""
    sized = type(before) is int and type(after) is int
    return _ratio(before, after) if sized else 1.0  # type: ignore[arg-type]


def _ratio(one: int, other: int) -> float:
    """Distance of two sizes on a log scale; sizes below 1 count as 1."""
    return abs(math.log(max(one, 1) / max(other, 1)))
