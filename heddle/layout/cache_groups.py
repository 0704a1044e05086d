"""Cache groups: layers that share block tables because their queries see keys by one rule.

A *page* is one block on one rank: `block_size` rows of as many layers as a group has. All groups
have the same number of layers (the last one of a rule may have fewer), so every page has the same
size and one pool of block ids serves all of them:

    layers       F W W W F W W W        F full, W window
    groups       F: 0 4     W: 1 2 | 3 5 | 6 7
    tensor 0     layer 0    1    3    6        a block id belongs to one group at a time
    tensor 1     layer 4    2    5    7

Recurrent layers store no rows by position and are in no group.

Legend: `N` ranks of a DCP group, `V` virtual block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle.config.model import ModelConfig
from heddle.config.visibility import Visibility
from heddle.layout.cut import cut
from heddle.layout.kv import KVLayout

MAX_GROUPS = 8
"""More groups waste fewer rows of a page and cost more bookkeeping in every step."""
SMALL_WINDOW_BLOCKS = 2
"""A window of fewer virtual blocks than this is stored whole on every rank: cutting it up would
cost an exchange and save little.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share block tables."""

    visibility: Visibility
    layers: tuple[int, ...]
    """Global layer indices, ascending; the j-th layer lives in the pool's tensor j."""
    world_size: int
    """`N` of its layouts: the DCP size, or 1 where every rank stores the whole window."""

    def layout(self, interleave_size: int, block_size: int, start_rank: int = 0) -> KVLayout:
        """Layout of a chain of this group; a group of one starts on its only rank."""
        if self.world_size == 1:
            return KVLayout(1, interleave_size, block_size, 0)
        return KVLayout(self.world_size, interleave_size, block_size, start_rank)


def create_cache_groups(
    model: ModelConfig, dcp_size: int, block_size: int
) -> tuple[CacheGroup, ...]:
    """The cache groups of a model: full attention first, then by first layer.

    Args:
        model: its layer kinds.
        dcp_size: ranks that may share a sequence.
        block_size: rows of a page.
    """
    by_rule: dict[Visibility, list[int]] = {}
    for layer in range(model.num_layers):
        kind = model.kind_of(layer)
        if kind.mixer == "attention":
            by_rule.setdefault(kind.visibility, []).append(layer)
    rules = sorted(by_rule.items(), key=lambda item: (not item[0].is_full, item[1][0]))
    size = page_layers([len(layers) for _, layers in rules])
    return tuple(
        CacheGroup(
            visibility=rule,
            layers=tuple(layers[start : start + size]),
            world_size=_world_size(rule, dcp_size, block_size),
        )
        for rule, layers in rules
        for start in range(0, len(layers), size)
    )


def page_layers(counts: list[int]) -> int:
    """Layers of a page: least waste with at most `MAX_GROUPS` groups, then the fewest groups.

    Args:
        counts: layers of each rule.
    Example:
        >>> page_layers([4, 22]), page_layers([12, 12]), page_layers([30]), page_layers([1, 30])
        (4, 12, 30, 5)
    """
    if len(counts) < 2:
        return sum(counts)

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = [size for size in range(1, max(counts) + 1) if groups(size) <= MAX_GROUPS]
    if not sizes:
        sizes = [max(counts)]
    return min(sizes, key=lambda size: (groups(size) * size, groups(size)))


def max_stage_tensors(groups: Sequence[CacheGroup], num_layers: int, num_stages: int) -> int:
    """KV tensors of the pipeline stage with the most: a stage holds only its own layers.

    Args:
        groups: of the model.
        num_layers: of the model.
        num_stages: pipeline stages.
    Example:
        >>> groups = [CacheGroup(visibility=Visibility(), layers=(0, 2, 4), world_size=1)]
        >>> [max_stage_tensors(groups, 5, stages) for stages in (1, 2, 3)]
        [3, 2, 1]
    """
    stages = [range(*cut(num_layers, num_stages, stage)) for stage in range(num_stages)]
    counts = (sum(layer in stage for layer in group.layers) for group in groups for stage in stages)
    return max(counts, default=0)


def _world_size(rule: Visibility, dcp_size: int, block_size: int) -> int:
    if rule.is_full or rule.size >= SMALL_WINDOW_BLOCKS * dcp_size * block_size:
        return dcp_size
    return 1
