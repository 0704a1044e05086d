"""What the accounting knows of a cache group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heddle.config.visibility import Visibility
from heddle.layout.cache_groups import CacheGroup
from heddle.layout.kv import KVLayout


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share block tables: what their queries see, and who stores it."""

    visibility: Visibility
    layout: KVLayout
    """Of a chain that starts on rank 0."""

    @property
    def unit(self) -> int:
        """`V`: positions of one block id."""
        return self.layout.virtual_block_size

    def start_rank(self, asked: int) -> int:
        """`u` of a sequence's chain in this group: a group of one has only rank 0."""
        return asked if self.layout.world_size > 1 else 0

    def layout_at(self, start_rank: int) -> KVLayout:
        """Layout of a sequence's chain."""
        return replace(self.layout, start_rank=self.start_rank(start_rank))

    def describe(self, index: int, start_rank: int) -> str:
        """A name of everything that fixes what a row of a chain means; part of every key."""
        rule, layout = self.visibility, self.layout_at(start_rank)
        return (
            f"group {index} {rule.kind} {rule.size} {rule.num_first} {layout.world_size} "
            f"{layout.interleave_size} {layout.block_size} {layout.start_rank}"
        )


def create_group_specs(
    groups: Sequence[CacheGroup], interleave_size: int, block_size: int
) -> tuple[GroupSpec, ...]:
    """The specs of a model's cache groups."""
    return tuple(
        GroupSpec(group.visibility, group.layout(interleave_size, block_size)) for group in groups
    )
