"""KV accounting for sequences: look up, start, grow, commit, release.

                 lookup -> fitting -> start        hit blocks, perhaps copies, new blocks
    each step    grow                              the rows of the step may need more blocks
                 take_edits                        copies and wipes that ranks do before they write
                 (ranks compute)
                 commit                            full blocks become findable, unseen ones go back
                 end_step                          sources of copies are let go
    at the end   release | quarantine              the tail becomes findable too | nothing does

A sequence has a chain in each cache group and, where the model has recurrent layers, state slots.
All groups take their blocks from one pool of ids: a page is a page.

Content becomes findable only after the step that wrote it has ended. A block or slot may be given
away while other steps are under way: ranks do steps in the order in which they were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from heddle.errors import KVCacheFull
from heddle.kvcache.audit import check_owners
from heddle.kvcache.blocks import BlockPool
from heddle.kvcache.copies import BlockCopy, CacheEdits
from heddle.kvcache.copying import Copying
from heddle.kvcache.finder import PrefixFinder
from heddle.kvcache.group_cache import GroupCache
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.hits import GroupHit, NoHit, PrefixHit
from heddle.kvcache.keys import COMMON, CacheIdentity, CacheScope
from heddle.kvcache.pins import PrefixPins, num_pinned_blocks
from heddle.kvcache.prefix import PrefixIndex
from heddle.kvcache.reservations import Reservations
from heddle.kvcache.rotation import least_loaded, num_start_ranks
from heddle.kvcache.sequence import SequenceBlocks
from heddle.kvcache.state_cache import StateCache
from heddle.layout.cache_need import longest_sequence
from heddle.layout.kv import KVLayout

DEFAULT_STATE_UNIT = 16
"""Tokens between snapshots where no block size says otherwise."""


class KVCacheManager:
    """One pool of virtual blocks, one of state slots, and their prefix cache.

    Args:
        num_blocks: virtual blocks, block 0 included.
        groups: the cache groups; none for a model without attention.
        identity: what turns tokens into stored bytes; part of every key.
        max_step_rows: most rows of one sequence in one step; windows are promised room for them.
        enable_prefix_caching: False: nothing is registered, every lookup is `EXCLUDED`.
        num_state_slots: slots for recurrent states, slot 0 included; 0: no recurrent layers.
        states_per_sequence: slots of a running sequence: one, and one per draft.
        state_unit: a step that ends at a multiple of it leaves a snapshot; None: the least common
            multiple of the groups' virtual blocks.
        rotates: start each chain on the rank that stores least, not on rank 0.
        max_pinned_tokens: of the pool that pins may hold, in whole blocks of the first group; no
            sequence is promised them.
    Raises:
        ConfigError: see `num_pinned_blocks`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        groups: Sequence[GroupSpec],
        identity: CacheIdentity,
        max_step_rows: int,
        enable_prefix_caching: bool = True,
        num_state_slots: int = 0,
        states_per_sequence: int = 1,
        state_unit: int | None = None,
        rotates: bool = False,
        max_pinned_tokens: int = 0,
    ) -> None:
        self.groups = tuple(groups)
        self.max_step_rows = max_step_rows
        units = [spec.unit for spec in self.groups]
        self.state_unit = state_unit or (math.lcm(*units) if units else DEFAULT_STATE_UNIT)
        self._is_caching = enable_prefix_caching
        index = PrefixIndex()
        self._pool = BlockPool(num_blocks, index)
        self._reservations = Reservations()
        self._group_caches = [
            GroupCache(spec, self._pool, self._reservations, max_step_rows) for spec in self.groups
        ]
        self._promises = any(cache.promises for cache in self._group_caches)
        self._states = StateCache(num_state_slots, states_per_sequence, self.state_unit)
        self._num_start_ranks = num_start_ranks(self.groups) if rotates else 1
        self._finder = PrefixFinder(
            self.groups, index, self._states, identity, self._num_start_ranks
        )
        self._live: set[SequenceBlocks] = set()
        self._copying = Copying(self._group_caches)
        max_pinned_blocks = num_pinned_blocks(
            max_pinned_tokens,
            self.virtual_block_size,
            self.num_usable_blocks,
            has_states=self.has_states,
        )
        self._pins = PrefixPins(self._pool, self._group_caches, max_pinned_blocks)
        self._usable_tokens = longest_sequence(
            [(spec.visibility, spec.unit) for spec in self.groups],
            self.num_usable_blocks - max_pinned_blocks,
            max_step_rows,
        )

    @property
    def layout(self) -> KVLayout | None:
        """Of the first cache group, as chains on rank 0 have it; None without attention."""
        return self.groups[0].layout if self.groups else None

    @property
    def virtual_block_size(self) -> int:
        """`V` of the first group: tokens of one block id; without groups, the state unit."""
        return self.groups[0].unit if self.groups else self.state_unit

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool that sequences can have; block 0 is not among them."""
        return self._pool.num_usable

    @property
    def num_available_blocks(self) -> int:
        """Blocks that nobody has or was promised: free, or cached without an owner."""
        return self._pool.num_available - self._reservations.num_outstanding

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without an owner whose content can be found."""
        return self._pool.num_cached

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that pins keep, whoever else owns them."""
        return len(self._pins)

    @property
    def usable_tokens(self) -> int:
        """Tokens of the longest sequence that fits alone, beside all that may be pinned."""
        return self._usable_tokens

    @property
    def has_states(self) -> bool:
        """The model has recurrent layers."""
        return self._states.is_used

    @property
    def states_per_sequence(self) -> int:
        """State slots of a running sequence."""
        return self._states.per_sequence

    @property
    def has_free_states(self) -> bool:
        """A sequence that starts now gets its state slots."""
        return self._states.has_room

    def new_sequence(self, scope: CacheScope = COMMON) -> SequenceBlocks:
        """A sequence that owns nothing yet; scopes do not see each other's content."""
        return self._finder.new_sequence(scope)

    # A start.

    def lookup(
        self, blocks: SequenceBlocks, tokens: Sequence[int], *, excluded: bool = False
    ) -> PrefixHit:
        """The longest known prefix, at most all tokens but the last, which must be computed.

        Args:
            blocks: of the sequence; learns keys on the way.
            tokens: all known tokens, at least one.
            excluded: the request needs every row computed (prompt logprobs).
        """
        if excluded or not self._is_caching:
            return PrefixHit(unit=self.virtual_block_size, reason=NoHit.EXCLUDED)
        return self._finder.find(blocks, tokens)

    def fitting(self, hit: PrefixHit, num_tokens: int) -> PrefixHit | None:
        """The part of a hit with which a sequence of `num_tokens` stored tokens fits now, or None.

        A copy needs its source besides the sequence's own blocks; in a full pool it is given up.
        """
        if not self._states.has_room:
            return None
        for candidate in (hit, hit.without_copy()) if hit.num_copied else (hit,):
            if self.start_cost(candidate, num_tokens) <= self.num_available_blocks:
                return candidate
        return None

    def start_cost(self, hit: PrefixHit, num_tokens: int) -> int:
        """Available blocks that a start would use up, promises included."""
        return sum(
            cache.start_cost(part, num_tokens)
            for cache, part in zip(self._group_caches, self._parts(hit), strict=True)
        )

    def start(self, blocks: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> None:
        """Give a sequence the hit's blocks, and new ones for `num_tokens` tokens in all.

        Window groups are promised theirs; `grow` takes them step by step.

        Args:
            blocks: owns nothing.
            hit: from `fitting`, with nothing allocated since.
            num_tokens: more than `hit.num_tokens`.
        """
        self._choose_start_rank(blocks, hit)
        parts = list(zip(self._group_caches, blocks.chains, self._parts(hit), strict=True))
        for cache, chain, part in parts:  # before any allocation, which may evict
            cache.share(chain, part, num_tokens)
        for cache, chain, _ in parts:
            cache.extend(chain, hit.num_tokens if cache.promises else num_tokens)
        self._copying.note(blocks, [part for _, _, part in parts])
        if blocks.states is not None:
            self._states.start(blocks.states, hit.snapshot)
        blocks.num_tokens = num_tokens
        self._live.add(blocks)

    # A step.

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Extend a sequence to hold `num_tokens` tokens: those that the next step computes.

        Raises:
            KVCacheFull: too few blocks are available; nothing has changed.
        """
        if num_tokens <= blocks.num_tokens and not self._promises:
            return  # a step asks when it chooses a sequence, and again when it is complete
        pairs = list(zip(self._group_caches, blocks.chains, strict=True))
        cost = sum(cache.growth_cost(chain, num_tokens) for cache, chain in pairs)
        if cost and cost > self.num_available_blocks:
            raise KVCacheFull(
                f"{cost} blocks wanted, {self.num_available_blocks} of {self.num_usable_blocks} "
                "available"
            )
        if cost or self._promises:  # most steps of a decode stay within its blocks
            for cache, chain in pairs:
                cache.extend(chain, num_tokens)
        blocks.num_tokens = max(blocks.num_tokens, num_tokens)

    def take_edits(self) -> CacheEdits:
        """What ranks do before the next step writes; each edit is told once."""
        return CacheEdits(
            copies=self._copying.take(),
            wiped_blocks=self._pool.take_to_wipe(),
            state_copies=self._states.take_copies(),
        )

    def end_step(self, copies: Iterable[BlockCopy]) -> None:
        """The step that did these copies has ended: their sources may be evicted again."""
        self._copying.end(copies)

    def commit(
        self,
        blocks: SequenceBlocks,
        tokens: Sequence[int],
        num_computed_tokens: int,
        num_accepted: int = 0,
    ) -> None:
        """Account for a step that has ended.

        Full blocks become findable, blocks that no query to come can see are given back, and at a
        border of the state unit a snapshot is taken.

        Args:
            blocks: of the sequence.
            tokens: all known ones.
            num_computed_tokens: those whose KV is right now; rejected drafts are not among them.
            num_accepted: drafts of the step that were right: which of its states is the current.
        """
        num_left = len(tokens) - num_computed_tokens
        for cache, chain in zip(self._group_caches, blocks.chains, strict=True):
            if self._is_caching:
                cache.register(chain, tokens, num_computed_tokens)
            cache.trim(chain, num_computed_tokens, num_left)
        if blocks.states is not None:
            blocks.states.advance(num_accepted)
            if self._is_caching and num_computed_tokens % self.state_unit == 0:
                self._states.snapshot(blocks.states, tokens, num_computed_tokens)

    # The end.

    def release(
        self,
        blocks: SequenceBlocks,
        tokens: Sequence[int],
        num_computed_tokens: int,
        *,
        has_current_state: bool = True,
    ) -> None:
        """End a sequence; all that it computed stays findable until evicted.

        Args:
            blocks: of the sequence.
            tokens: all known ones.
            num_computed_tokens: those whose KV is right.
            has_current_state: False: a step that was not accounted for has moved the state on.
        """
        for cache, chain in zip(self._group_caches, blocks.chains, strict=True):
            if self._is_caching and chain.block_table:
                cache.register(chain, tokens, num_computed_tokens)
                cache.register_tail(chain, tokens, num_computed_tokens)
            cache.drop(chain)
        if blocks.states is not None:
            keeps = self._is_caching and has_current_state
            self._states.end(blocks.states, tokens, num_computed_tokens, keeps=keeps)
        self._live.discard(blocks)

    def quarantine(self, blocks: SequenceBlocks) -> None:
        """End a sequence not to be trusted: hashes go now, blocks are wiped once unowned."""
        for cache, chain in zip(self._group_caches, blocks.chains, strict=True):
            distrusted = tuple(filter(None, chain.block_table))
            cache.quarantine(chain)
            self._pins.forget(distrusted)
        if blocks.states is not None:
            self._states.distrust(blocks.states)
        self._live.discard(blocks)

    # Pins.

    def pin(self, tokens: Sequence[int], until: float, scope: CacheScope = COMMON) -> int:
        """Keep the longest known prefix of some tokens findable, whatever else needs room.

        Args:
            tokens: of a prompt whose rows were computed, running or ended, at least one.
            until: seconds of the clock that `expire_pins` is told.
            scope: of the prompt.
        Returns:
            Tokens that are kept: what a prompt that goes on from `tokens` would find.
        Raises:
            RequestError: (`pin_refused`) nothing of it is known, or there is no room for pins.
        """
        # One token more than is asked for: the last token of a prompt is never hit.
        hit = self.lookup(self.new_sequence(scope), [*tokens, tokens[-1]])
        self._pins.keep(hit, until, self.num_available_blocks)
        return hit.num_tokens

    def expire_pins(self, now: float) -> None:
        """Let go of what was pinned until `now` or earlier; call it before each step."""
        self._pins.expire(now)

    def note_freed(self) -> None:
        """See `BlockPool.note_freed`."""
        self._pool.note_freed()

    def take_freed(self) -> tuple[int, ...]:
        """See `BlockPool.take_freed`."""
        return self._pool.take_freed()

    def reset_prefix_cache(self) -> None:
        """Forget all content, and all pins; running sequences keep what they own."""
        self._pins.forget_all()
        self._pool.forget_all()
        self._states.forget_all()

    def audit(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Check the pools, and that what they count is what `sequences` (all live ones) own.

        Raises:
            AssertionError: names the first block or slot that is wrong.
        """
        live = list(sequences)
        others = [*self._copying, *self._pins]
        check_owners(self._pool, self._reservations, self._group_caches, live, others)
        self._states.audit([sequence.states for sequence in live if sequence.states is not None])

    def _choose_start_rank(self, blocks: SequenceBlocks, hit: PrefixHit) -> None:
        """A hit is inherited with its start rank; a new chain starts where least lies."""
        start_rank = hit.start_rank
        if self._num_start_ranks > 1 and not hit.num_tokens:
            start_rank = least_loaded(self.groups, self._live)
        blocks.candidates = {start_rank: self._finder.chains(blocks, start_rank)}
        blocks.start_rank = start_rank

    def _parts(self, hit: PrefixHit) -> tuple[GroupHit, ...]:
        return hit.groups or (GroupHit(),) * len(self.groups)
