"""The longest prefix that every part of a model has.

Each part (a cache group, the recurrent layers) answers one question: what is the longest prefix of
at most x tokens that you can go on from?

    full attention    tokens 0 .. x               all blocks, then a share of one more
    window            the keys that a query at x or later sees, and the first tokens
    recurrent         a snapshot exactly at x

The answers are asked for in turn, each capped by the one before, until nobody lowers x. An answer
never falls when x rises, so this ends at the longest common prefix.

Legend: `V` virtual block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

from heddle.kvcache.chain import BlockChain, block_tokens
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.hits import GroupHit
from heddle.kvcache.prefix import NO_BLOCK, PrefixIndex
from heddle.layout.cache_need import first_needed_block, num_first_blocks


class PartLookup(Protocol):
    """What one part of a model has of a prompt."""

    def best(self, end: int) -> int:
        """Tokens of the longest prefix to go on from, at most `end`."""
        ...


def longest_common(parts: Sequence[PartLookup], limit: int) -> int:
    """Tokens of the longest prefix of at most `limit` that every part can go on from."""
    end, before = limit, -1
    while end != before:
        before = end
        for part in parts:
            end = part.best(end)
        if len(parts) == 1:
            break  # it would say the same again
    return end


class GroupLookup:
    """What the index holds of a prompt in one cache group. Each block is looked up once.

    Args:
        spec: of the group.
        chain: of the sequence; learns keys.
        index: what all blocks hold.
        tokens: of the prompt.
        limit: most tokens that a hit may have.
        whole_blocks: True: no copy of a part of a block.
    """

    def __init__(
        self,
        spec: GroupSpec,
        chain: BlockChain,
        index: PrefixIndex,
        tokens: Sequence[int],
        limit: int,
        *,
        whole_blocks: bool,
    ) -> None:
        self._spec, self._chain, self._index = spec, chain, index
        self._tokens, self._limit, self._whole_blocks = tokens, limit, whole_blocks
        self._blocks: dict[int, int] = {}

    @property
    def is_full(self) -> bool:
        """The group sees every token, so its best prefix is what the prompt shares with any."""
        return self._spec.visibility.is_full

    def best(self, end: int) -> int:
        """Tokens of the longest prefix to go on from, at most `end`."""
        return self._best_full(end) if self.is_full else self._best_window(end)

    def hit(self, end: int) -> GroupHit:
        """The blocks of a prefix that `best` has found."""
        count, rest = divmod(end, self._spec.unit)
        self._chain.learn_keys(self._tokens, self._spec.unit, end)
        blocks = [NO_BLOCK] * count
        for index in self._needed(end):
            blocks[index] = self._block(index)
        source = self._share(count)[0] if rest else NO_BLOCK
        return GroupHit(tuple(blocks), source, rest)

    def first_tokens(self) -> tuple[int, ...]:
        """The tokens of the first block."""
        return block_tokens(self._tokens, 0, self._spec.unit, self._limit)

    def _best_full(self, end: int) -> int:
        """Blocks follow one another from the start, so the first miss decides."""
        count = 0
        while (count + 1) * self._spec.unit <= end and self._block(count):
            count += 1
        return count * self._spec.unit + self._offset(count, end)

    def _best_window(self, end: int) -> int:
        """From the end down: within a block the longest share needs the fewest others."""
        unit = self._spec.unit
        for count in range(end // unit, -1, -1):
            found = count * unit + self._offset(count, end)
            if all(self._block(index) for index in self._needed(found)):
                return found
        return 0

    def _needed(self, end: int) -> Iterator[int]:
        """Whole blocks before `end` that a query there or later sees, the last one first."""
        rule, unit, count = self._spec.visibility, self._spec.unit, end // self._spec.unit
        start = first_needed_block(rule, unit, end)
        firsts = min(num_first_blocks(rule, unit), start, count)
        return chain(range(count - 1, start - 1, -1), range(firsts - 1, -1, -1))

    def _offset(self, index: int, end: int) -> int:
        """Tokens of block `index` that may be copied, up to position `end`."""
        room = end - index * self._spec.unit
        if self._whole_blocks or room <= 0:
            return 0
        return min(room, self._share(index)[1])

    def _block(self, index: int) -> int:
        """The full block at `index`, or `NO_BLOCK`."""
        if index not in self._blocks:
            parent = self._parent(index)
            found = None
            if (index + 1) * self._spec.unit <= self._limit and self._index.has_children(parent):
                found = self._index.full(parent, self._piece(index))
            self._blocks[index] = NO_BLOCK if found is None else found
        return self._blocks[index]

    def _share(self, index: int) -> tuple[int, int]:
        """(block, tokens) of the block that shares most tokens with the prompt at `index`."""
        parent = self._parent(index)
        if not self._index.has_children(parent):
            return NO_BLOCK, 0
        return self._index.longest(parent, self._piece(index))

    def _parent(self, index: int) -> bytes:
        self._chain.learn_keys(self._tokens, self._spec.unit, index * self._spec.unit)
        return self._chain.parent_key(index)

    def _piece(self, index: int) -> tuple[int, ...]:
        return block_tokens(self._tokens, index, self._spec.unit, self._limit)
