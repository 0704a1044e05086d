"""KV accounting for sequences: look up, start, grow, commit, release.

                 lookup -> fitting -> start        new chain: hit blocks, perhaps a copy, new blocks
    each step    grow                              one more token may need one more block
                 take_edits                        copies and wipes that ranks do before they write
                 (ranks compute)
                 commit                            full blocks become findable
                 end_step                          sources of copies are let go
    at the end   release | quarantine              the tail becomes findable too | nothing does

Content becomes findable only after the step that wrote it has ended, and a block is given away only
between steps.

Legend: `V` virtual block size in tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from heddle.kvcache.blocks import BlockPool
from heddle.kvcache.chain import BlockChain, block_tokens
from heddle.kvcache.copies import BlockCopy
from heddle.kvcache.hits import NoHit, PrefixHit
from heddle.kvcache.keys import CacheIdentity, root_key
from heddle.kvcache.prefix import Node, PrefixIndex
from heddle.layout.kv import KVLayout


class KVCacheManager:
    """One pool of virtual blocks and its prefix cache.

    Args:
        num_blocks: virtual blocks, block 0 included.
        layout: of every sequence in this pool.
        identity: what turns tokens into stored bytes; part of every key.
        enable_prefix_caching: False: nothing is registered, every lookup is `EXCLUDED`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        layout: KVLayout,
        identity: CacheIdentity,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.layout = layout
        self._identity = identity
        self._caches = enable_prefix_caching
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, self._index)
        self._copies: list[BlockCopy] = []
        self._pinned: list[int] = []

    @property
    def virtual_block_size(self) -> int:
        """`V`: tokens that one block id covers; unit of allocation and of shared hits."""
        return self.layout.virtual_block_size

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool that sequences can have; block 0 is not among them."""
        return self._pool.num_usable

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be given out now: free, or cached without an owner."""
        return self._pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without an owner whose content can be found."""
        return self._pool.num_cached

    @property
    def usable_tokens(self) -> int:
        """Tokens that the whole pool holds: the longest sequence."""
        return self.num_usable_blocks * self.virtual_block_size

    def new_chain(self, cache_salt: str | None = None) -> BlockChain:
        """Chain of a sequence that has no blocks yet; salts do not see each other's content."""
        return BlockChain(root=root_key(self._identity, cache_salt))

    def lookup(
        self, chain: BlockChain, tokens: Sequence[int], *, excluded: bool = False
    ) -> PrefixHit:
        """The longest known prefix, at most all tokens but the last, which must be computed.

        Args:
            chain: of the sequence; learns keys on the way.
            tokens: all known tokens, at least one.
            excluded: the request needs every row computed (prompt logprobs).
        """
        unit, limit = self.virtual_block_size, len(tokens) - 1
        if excluded or not self._caches:
            return PrefixHit(unit=unit, reason=NoHit.EXCLUDED)
        blocks: list[int] = []
        while (len(blocks) + 1) * unit <= limit:
            piece = block_tokens(tokens, len(blocks), unit, limit)
            block = self._index.full(chain.parent_key(len(blocks)), piece)
            if block is None:
                break
            chain.learn_key(len(blocks), piece)
            blocks.append(block)
        piece = block_tokens(tokens, len(blocks), unit, limit)
        source, shared = self._index.longest(chain.parent_key(len(blocks)), piece)
        reason = None if blocks or shared else self._reason(chain, piece)
        return PrefixHit(
            unit=unit, blocks=tuple(blocks), copy_source=source, num_copied=shared, reason=reason
        )

    def fitting(self, hit: PrefixHit, num_tokens: int) -> PrefixHit | None:
        """The part of a hit with which a sequence of `num_tokens` stored tokens fits now, or None.

        A copy needs its source besides the sequence's own blocks; in a full pool it is given up.
        """
        for candidate in (hit, hit.without_copy()) if hit.num_copied else (hit,):
            if self.start_cost(candidate, num_tokens) <= self.num_available_blocks:
                return candidate
        return None

    def start_cost(self, hit: PrefixHit, num_tokens: int) -> int:
        """Available blocks that a start would use up: new ones, and hit ones that nobody owns."""
        sources = (hit.copy_source,) if hit.num_copied else ()
        unowned = sum(not self._pool.references(block) for block in (*hit.blocks, *sources))
        return self.layout.num_virtual_blocks(num_tokens) - len(hit.blocks) + unowned

    def start(self, chain: BlockChain, hit: PrefixHit, num_tokens: int) -> None:
        """Give a chain the hit's blocks and new ones for `num_tokens` tokens in all.

        Args:
            chain: without blocks.
            hit: from `fitting`, with nothing allocated since.
            num_tokens: more than `hit.num_tokens`.
        """
        assert not chain.block_table, "a chain starts once"
        shared = [*hit.blocks, hit.copy_source] if hit.num_copied else hit.blocks
        for block in shared:
            self._pool.share(block)
        chain.block_table = list(hit.blocks)
        chain.num_registered = len(hit.blocks)
        self.grow(chain, num_tokens)
        if hit.num_copied:
            self._pinned.append(hit.copy_source)
            self._copies.append(self._copy_of(chain, hit))

    def grow(self, chain: BlockChain, num_tokens: int) -> None:
        """Extend a chain to hold `num_tokens` tokens.

        Raises:
            KVCacheFull: too few blocks are available; nothing has changed.
        """
        table = chain.block_table
        missing = self.layout.num_virtual_blocks(num_tokens) - len(table)
        if missing > 0:
            table += self._pool.allocate(missing, after=table[-1] if table else None)

    def take_edits(self) -> tuple[tuple[BlockCopy, ...], tuple[int, ...]]:
        """(copies, blocks to wipe) for the next step, each told once; wipes come before copies."""
        copies, self._copies = tuple(self._copies), []
        return copies, self._pool.take_to_wipe()

    def end_step(self) -> None:
        """The step that did the copies has ended: their sources may be evicted again."""
        for block in self._pinned:
            self._pool.release(block)
        self._pinned.clear()

    def commit(self, chain: BlockChain, tokens: Sequence[int], num_computed_tokens: int) -> None:
        """Make full blocks findable, once the step that filled them has ended."""
        if not self._caches:
            return
        unit = self.virtual_block_size
        for index in range(chain.num_registered, num_computed_tokens // unit):
            piece = block_tokens(tokens, index, unit, num_computed_tokens)
            self._register(chain, index, piece)
            chain.learn_key(index, piece)
            chain.num_registered = index + 1

    def release(self, chain: BlockChain, tokens: Sequence[int], num_computed_tokens: int) -> None:
        """End a chain between steps; all that it computed stays findable until evicted."""
        self.commit(chain, tokens, num_computed_tokens)
        unit = self.virtual_block_size
        tail = block_tokens(tokens, num_computed_tokens // unit, unit, num_computed_tokens)
        if tail and self._caches:
            self._register(chain, num_computed_tokens // unit, tail)
        self._drop_blocks(chain)

    def quarantine(self, chain: BlockChain) -> None:
        """End a chain not to be trusted: hashes go now, blocks are wiped once unowned."""
        for block in chain.block_table:
            self._pool.quarantine(block)
        self._drop_blocks(chain)

    def reset_prefix_cache(self) -> None:
        """Forget all content; running sequences keep their blocks."""
        self._pool.forget_all()

    def audit(self, chains: Iterable[BlockChain]) -> None:
        """Check the pool, and that its reference counts are those of `chains` (all live ones).

        Raises:
            AssertionError: names the first block that is wrong.
        """
        self._pool.audit()
        owners = Counter(block for chain in chains for block in chain.block_table)
        owners.update(self._pinned)
        for block in range(self.num_usable_blocks + 1):
            count = self._pool.references(block)
            if count != owners[block]:
                raise AssertionError(f"block {block} counts {count} owners, has {owners[block]}")

    def _copy_of(self, chain: BlockChain, hit: PrefixHit) -> BlockCopy:
        start = len(hit.blocks) * hit.unit
        return BlockCopy(
            source_block=hit.copy_source,
            target_block=chain.block_table[len(hit.blocks)],
            start=start,
            end=start + hit.num_copied,
            start_rank=self.layout.start_rank,
        )

    def _register(self, chain: BlockChain, index: int, piece: tuple[int, ...]) -> None:
        node = Node(chain.parent_key(index), piece, is_first=index == 0)
        self._pool.register(chain.block_table[index], node)

    def _drop_blocks(self, chain: BlockChain) -> None:
        for block in reversed(chain.block_table):  # the tail is evicted before what it hangs on
            self._pool.release(block)
        chain.block_table = []

    def _reason(self, chain: BlockChain, piece: tuple[int, ...]) -> NoHit:
        evicted = self._index.was_evicted(chain.root, piece)
        return NoHit.EVICTED if evicted else NoHit.NOTHING_SHARED
