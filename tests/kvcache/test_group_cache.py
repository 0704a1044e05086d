"""One group alone, on a pool of its own."""

from __future__ import annotations

from heddle.config.visibility import FULL, Visibility
from heddle.kvcache.blocks import BlockPool
from heddle.kvcache.chain import BlockChain
from heddle.kvcache.group_cache import GroupCache
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.hits import GroupHit
from heddle.kvcache.prefix import PrefixIndex
from heddle.kvcache.reservations import Reservations
from heddle.layout.kv import KVLayout


def make(rule, max_step_rows=3, num_blocks=20):
    pool, books = BlockPool(num_blocks, PrefixIndex()), Reservations()
    spec = GroupSpec(rule, KVLayout(1, 1, 2))
    return GroupCache(spec, pool, books, max_step_rows), pool, books


def test_full_attention_promises_nothing_and_asks_each_time():
    cache, pool, books = make(FULL)
    chain = BlockChain(root=b"")
    assert cache.start_cost(GroupHit(), 7) == 4
    cache.share(chain, GroupHit(), 7)
    cache.extend(chain, 7)
    assert (chain.num_held, books.num_promised, pool.num_available) == (4, 0, 15)
    assert [cache.growth_cost(chain, count) for count in (7, 8, 9)] == [0, 0, 1]
    cache.trim(chain, 7, 0)
    assert chain.num_held == 4
    cache.drop(chain)
    assert (pool.num_available, chain.block_table) == (19, [])


def test_a_window_is_promised_what_its_widest_step_touches():
    cache, pool, books = make(Visibility("window", 4))
    chain = BlockChain(root=b"")
    assert cache.start_cost(GroupHit(), 50) == 4  # 3 + 3 tokens touch at most 4 blocks of 2
    cache.share(chain, GroupHit(), 50)
    assert (chain.num_reserved, books.num_outstanding) == (4, 4)
    for end in range(3, 51, 3):
        assert cache.growth_cost(chain, end) == 0
        cache.extend(chain, end)
        cache.trim(chain, end, 50 - end)
        assert books.num_outstanding == chain.num_reserved - chain.num_held >= 0
        assert pool.num_available == 19 - chain.num_held
    cache.trim(chain, 50, 0)
    assert chain.num_reserved == 3  # a row at a time: 3 + 1 tokens touch at most 3 blocks


def test_a_short_prompt_is_promised_its_length_and_asks_as_it_grows():
    cache, _, books = make(Visibility("window", 40))
    chain = BlockChain(root=b"")
    cache.share(chain, GroupHit(), 3)
    cache.extend(chain, 3)
    assert (chain.num_reserved, books.num_outstanding) == (2, 0)
    assert [cache.growth_cost(chain, count) for count in (4, 5, 7)] == [0, 1, 2]


def test_the_source_of_a_copy_counts_beside_the_promise():
    cache, pool, books = make(Visibility("window", 4))
    donor, heir = BlockChain(root=b""), BlockChain(root=b"")
    cache.share(donor, GroupHit(), 2)
    cache.extend(donor, 2)
    (block,) = donor.block_table
    hit = GroupHit((), block, 1)
    assert cache.start_cost(hit, 4) == 2 + 1
    cache.share(heir, hit, 4)
    cache.extend(heir, 1)
    assert (books.num_promised, books.num_outstanding) == (1 + 2 + 1, 2)
    cache.drop(donor)
    assert (books.num_promised, books.num_outstanding) == (2 + 1, 1)
    cache.unpin(block)
    assert (books.num_promised, books.num_outstanding, pool.num_available) == (2, 1, 18)
