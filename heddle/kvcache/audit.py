"""Do the books agree: what pools count against what sequences, copies and pins own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from heddle.kvcache.blocks import BlockPool
from heddle.kvcache.group_cache import GroupCache
from heddle.kvcache.reservations import Reservations
from heddle.kvcache.sequence import SequenceBlocks


def check_owners(
    pool: BlockPool,
    reservations: Reservations,
    group_caches: Sequence[GroupCache],
    sequences: Sequence[SequenceBlocks],
    others: Iterable[tuple[int, int]],
) -> None:
    """Check the count of each block and all promises.

    Args:
        pool: of all groups.
        reservations: of all groups.
        group_caches: in order.
        sequences: all live ones.
        others: (block, cache group) of each owner that is no sequence.
    Raises:
        AssertionError: names the first block that is wrong.
    """
    pool.audit()
    owners, promised_blocks = Counter[int](), Counter[int]()
    num_promised = 0
    for at, cache in enumerate(group_caches):
        for chain in [sequence.chains[at] for sequence in sequences if sequence.chains]:
            owners.update(filter(None, chain.block_table))
            promised_blocks.update(cache.held(chain))
            num_promised += chain.num_reserved
    for block, group in others:
        owners[block] += 1
        if group_caches[group].promises:
            promised_blocks[block] += 1
            num_promised += 1
    for block in range(pool.num_usable + 1):
        count = pool.references(block)
        if count != owners[block]:
            raise AssertionError(f"block {block} counts {count} owners, has {owners[block]}")
    reservations.audit(num_promised, promised_blocks)
