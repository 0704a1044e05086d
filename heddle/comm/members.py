"""Which list of a partition of the world a rank belongs to.

Every rank forms the same groups from the same lists, so each implementation starts with this
question.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from heddle.errors import TopologyError

Members = tuple[tuple[int, ...], ...]
"""All groups of one kind, each an ordered tuple of global ranks."""


def frozen_members(world_size: int, members: Sequence[Sequence[int]]) -> Members:
    """The lists as tuples, once it is known that together they tile the world.

    Raises:
        TopologyError: a rank is missing, named twice, or out of range.
    """
    lists = tuple(tuple(ranks) for ranks in members)
    if sorted(chain.from_iterable(lists)) != list(range(world_size)):
        raise TopologyError(
            [f"groups {lists} must name each of the ranks 0..{world_size - 1} exactly once"]
        )
    return lists


def own_members(global_rank: int, members: Members) -> tuple[int, ...]:
    """The ordered list that holds `global_rank`.

    Raises:
        TopologyError: no list names the rank.
    """
    for ranks in members:
        if global_rank in ranks:
            return ranks
    raise TopologyError([f"rank {global_rank} is in none of the groups {members}"])
