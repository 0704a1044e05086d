"""What the cache holds of a sequence's tokens, on each rank where its chains may start.

A chain's keys name its start rank, so with start-rank rotation a prompt is looked up once per rank,
each time under other keys. The longest hit decides; a sequence that shares nothing may start
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heddle.kvcache.chain import BlockChain
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.hits import PrefixHit
from heddle.kvcache.keys import CacheIdentity, CacheScope, root_key
from heddle.kvcache.prefix import PrefixIndex
from heddle.kvcache.search import PrefixSearch
from heddle.kvcache.sequence import SequenceBlocks
from heddle.kvcache.state_cache import StateCache


class PrefixFinder:
    """Names chains and looks prompts up; gives nothing out.

    Args:
        groups: the cache groups.
        index: what all blocks hold.
        states: snapshots of recurrent states.
        identity: what turns tokens into stored bytes; part of every key.
        num_start_ranks: ranks on which a chain may start, from rank 0 on.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        index: PrefixIndex,
        states: StateCache,
        identity: CacheIdentity,
        num_start_ranks: int,
    ) -> None:
        self._groups, self._index, self._states = tuple(groups), index, states
        self._identity = identity
        self._num_start_ranks = num_start_ranks

    def new_sequence(self, scope: CacheScope) -> SequenceBlocks:
        """A sequence that owns nothing yet."""
        blocks = SequenceBlocks(scope=scope)
        self.chains(blocks, blocks.start_rank)
        if self._states.is_used:
            blocks.states = self._states.new(self._root(f"states {self._states.unit}", scope))
        return blocks

    def chains(self, blocks: SequenceBlocks, start_rank: int) -> list[BlockChain]:
        """The chains that a sequence has, or would have, on a start rank."""
        if start_rank not in blocks.candidates:
            blocks.candidates[start_rank] = [
                BlockChain(root=self._root(spec.describe(group, start_rank), blocks.scope))
                for group, spec in enumerate(self._groups)
            ]
        return blocks.candidates[start_rank]

    def find(self, blocks: SequenceBlocks, tokens: Sequence[int]) -> PrefixHit:
        """The longest hit over all start ranks, the lowest rank of equals.

        Args:
            blocks: of the sequence; its chains learn keys.
            tokens: all known ones, at least one; the last is never hit.
        """
        hits = [self._search(blocks, tokens, rank).find() for rank in range(self._num_start_ranks)]
        best = max(hits, key=lambda hit: hit.num_tokens)
        if not best.num_copied:
            return best
        whole = self._search(blocks, tokens, best.start_rank).find(whole_blocks=True)
        return replace(best, whole=whole)

    def _search(
        self, blocks: SequenceBlocks, tokens: Sequence[int], start_rank: int
    ) -> PrefixSearch:
        states = blocks.states
        return PrefixSearch(
            self._groups,
            self.chains(blocks, start_rank),
            self._index,
            states=None if states is None else self._states.lookup(states, tokens),
            state_unit=self._states.unit,
            tokens=tokens,
            start_rank=start_rank,
        )

    def _root(self, place: str, scope: CacheScope) -> bytes:
        return root_key(replace(self._identity, place=place), scope)
