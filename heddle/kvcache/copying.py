"""Copies of parts of blocks, from the start that wants one to the end of the step that did it.

start --note--> to be told --take--> under way --end--> done
                the source is held until then: it may lose all its other owners
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from heddle.kvcache.copies import BlockCopy
from heddle.kvcache.group_cache import GroupCache
from heddle.kvcache.hits import GroupHit
from heddle.kvcache.sequence import SequenceBlocks


class Copying:
    """Knows which sources are held.

    Args:
        group_caches: of the manager, in order.
    """

    def __init__(self, group_caches: Sequence[GroupCache]) -> None:
        self._group_caches = tuple(group_caches)
        self._untold: list[BlockCopy] = []
        self._open: list[BlockCopy] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(source block, cache group) of each copy that has not ended."""
        return ((copy.source_block, copy.group) for copy in self._open)

    def note(self, blocks: SequenceBlocks, parts: Sequence[GroupHit]) -> None:
        """A sequence has started with a hit, whose sources are held; its blocks are there.

        Args:
            blocks: of the sequence.
            parts: of the hit, one per cache group.
        """
        copies = [
            self._copy_of(blocks, group, part)
            for group, part in enumerate(parts)
            if part.num_copied
        ]
        self._untold += copies
        self._open += copies

    def take(self) -> tuple[BlockCopy, ...]:
        """What the next step copies; each copy is told once."""
        copies, self._untold = tuple(self._untold), []
        return copies

    def end(self, copies: Iterable[BlockCopy]) -> None:
        """The step that did these copies has ended: their sources may be evicted again."""
        for copy in copies:
            self._open.remove(copy)
            self._group_caches[copy.group].unpin(copy.source_block)

    def _copy_of(self, blocks: SequenceBlocks, group: int, part: GroupHit) -> BlockCopy:
        spec = self._group_caches[group].spec
        start = len(part.blocks) * spec.unit
        return BlockCopy(
            source_block=part.copy_source,
            target_block=blocks.chains[group].block_table[len(part.blocks)],
            start=start,
            end=start + part.num_copied,
            start_rank=spec.start_rank(blocks.start_rank),
            group=group,
        )
