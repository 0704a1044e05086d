"""The manager by its laws: hits, copies, reuse, counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import KVCacheFull
from heddle.kvcache.copies import BlockCopy
from heddle.kvcache.hits import NoHit
from heddle.kvcache.keys import CacheIdentity
from heddle.kvcache.manager import KVCacheManager
from heddle.layout.kv import KVLayout
from tests.kvcache.fake_rows import FakeRows

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def make_cache(num_blocks=100, *, ranks=2, block_size=2, caching=True):
    return KVCacheManager(
        num_blocks=num_blocks,
        layout=KVLayout(world_size=ranks, interleave_size=1, block_size=block_size),
        identity=CacheIdentity(model="m", kv_cache_dtype="float32", layout_fingerprint=1),
        enable_prefix_caching=caching,
    )


def start(cache, tokens, salt=None):
    """Look up and start one chain; returns it with its hit."""
    chain = cache.new_chain(salt)
    hit = cache.fitting(cache.lookup(chain, tokens), len(tokens))
    assert hit is not None
    cache.start(chain, hit, len(tokens))
    return chain, hit


def run_once(cache, tokens, salt=None):
    """A sequence that is computed and ends; returns its hit."""
    chain, hit = start(cache, tokens, salt)
    cache.take_edits()
    cache.end_step()
    cache.release(chain, tokens, len(tokens))
    return hit


def shared_len(left, right):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(st.lists(TOKENS, min_size=1, max_size=5), TOKENS, st.integers(1, 3), st.integers(1, 3))
def test_a_hit_is_what_is_shared_but_never_the_whole_prompt(past, prompt, ranks, block_size):
    cache = make_cache(ranks=ranks, block_size=block_size)
    for tokens in past:
        run_once(cache, tokens)
    hit = cache.lookup(cache.new_chain(), prompt)
    shared = max(shared_len(tokens, prompt) for tokens in past)
    assert hit.num_tokens == min(shared, len(prompt) - 1)
    assert (hit.reason is None) == (hit.num_tokens > 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_shares_around_a_virtual_block(ranks, extra):
    cache = make_cache(ranks=ranks, block_size=8)
    unit = 8 * ranks
    run_once(cache, [1] * (unit + extra) + [2] * 40)
    hit = cache.lookup(cache.new_chain(), [1] * (unit + extra) + [3] * 40)
    assert hit.num_tokens == unit + extra
    assert len(hit.blocks) == (unit + extra) // unit


def test_salts_do_not_see_each_other():
    cache = make_cache()
    run_once(cache, [1, 2, 3, 4, 5, 6], salt="a")
    assert cache.lookup(cache.new_chain("b"), [1, 2, 3, 4, 5, 6]).reason is NoHit.NOTHING_SHARED
    assert cache.lookup(cache.new_chain("a"), [1, 2, 3, 4, 5, 6]).num_tokens == 5


def test_the_copy_of_a_tail_says_which_rows_go_where_and_pins_its_source():
    cache = make_cache(num_blocks=5)
    run_once(cache, [1, 2, 3, 4, 5, 6, 7])
    chain, hit = start(cache, [1, 2, 3, 4, 5, 6, 9])
    assert (len(hit.blocks), hit.num_copied) == (1, 2)
    target = chain.block_table[1]
    copies, wiped = cache.take_edits()
    assert copies == (BlockCopy(source_block=hit.copy_source, target_block=target, start=4, end=6),)
    assert wiped == ()
    assert cache.take_edits() == ((), ())
    assert (cache.num_cached_blocks, cache.num_available_blocks) == (0, 1)
    cache.audit([chain])
    cache.end_step()
    assert (cache.num_cached_blocks, cache.num_available_blocks) == (1, 2)
    assert target != hit.copy_source


def test_in_a_full_pool_the_copy_is_given_up_and_the_reason_has_numbers():
    cache = make_cache(num_blocks=3)
    run_once(cache, [1, 2, 3])
    tokens = [1, 2, 9, 9, 9, 9, 9, 9]
    chain, hit = start(cache, tokens)
    assert (hit.num_tokens, hit.explain()) == (0, "shared less than the unit: 2 shared, unit 4")
    assert sorted(chain.block_table) == [1, 2]
    assert cache.take_edits() == ((), ())


def test_each_zero_hit_has_its_reason():
    cache = make_cache(num_blocks=3)
    assert cache.lookup(cache.new_chain(), [1, 2, 3]).reason is NoHit.NOTHING_SHARED
    run_once(cache, [1, 2, 3, 4, 5])
    assert cache.lookup(cache.new_chain(), [1, 2, 3]).reason is None
    assert cache.lookup(cache.new_chain(), [1, 2], excluded=True).reason is NoHit.EXCLUDED
    run_once(cache, [9] * 8)
    assert cache.lookup(cache.new_chain(), [1, 2, 3, 4, 5]).reason is NoHit.EVICTED
    assert cache.lookup(cache.new_chain(), [7, 7, 7]).reason is NoHit.NOTHING_SHARED
    off = make_cache(caching=False)
    run_once(off, [1, 2, 3, 4, 5])
    assert off.lookup(off.new_chain(), [1, 2, 3]).reason is NoHit.EXCLUDED
    assert off.num_cached_blocks == 0


def test_six_units_a_then_b_that_evicts_then_a_again():
    cache, rows = make_cache(num_blocks=7, block_size=4), FakeRows(7, 8)

    def run(tokens):
        chain, hit = start(cache, tokens)
        rows.spoil(chain.block_table[len(hit.blocks) :])
        rows.edit(*cache.take_edits())
        rows.write(chain.block_table, tokens, hit.num_tokens, len(tokens))
        cache.end_step()
        cache.release(chain, tokens, len(tokens))
        return hit.num_tokens

    first, second = list(range(16)), list(range(100, 140))
    assert [run(first), run(second), run(first)] == [
        0,
        0,
        8,
    ]  # A's tail block went, its head did not
    assert run(second) < 40


def test_content_is_found_only_after_the_step_that_wrote_it():
    cache = make_cache()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    chain, _ = start(cache, tokens)
    cache.take_edits()
    assert cache.lookup(cache.new_chain(), tokens).num_tokens == 0
    cache.end_step()
    cache.commit(chain, tokens, 5)
    assert cache.lookup(cache.new_chain(), tokens).num_tokens == 4
    cache.release(chain, tokens, 7)
    assert cache.lookup(cache.new_chain(), tokens).num_tokens == 7


def test_a_parent_computed_anew_finds_its_old_child():
    cache = make_cache(num_blocks=6)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    run_once(cache, tokens)
    cache._pool.share(2)  # the child stays while the pool is emptied around it
    run_once(cache, [9] * 16)
    assert cache.lookup(cache.new_chain(), [*tokens, 9]).reason is NoHit.EVICTED
    run_once(cache, [*tokens[:4], 7])
    assert cache.lookup(cache.new_chain(), [*tokens, 9]).num_tokens == 8


def test_quarantined_blocks_are_lost_to_lookups_and_wiped_when_the_last_owner_leaves():
    cache = make_cache()
    tokens = [1, 2, 3, 4, 5, 6]
    run_once(cache, tokens)
    bad, _ = start(cache, tokens)
    good, _ = start(cache, [1, 2, 3, 4, 9])
    shared, own = bad.block_table[0], bad.block_table[1]
    assert good.block_table[0] == shared
    cache.take_edits()
    cache.end_step()
    cache.quarantine(bad)
    assert cache.take_edits() == ((), (own,))
    assert cache.lookup(cache.new_chain(), tokens).num_tokens == 0
    cache.commit(good, [1, 2, 3, 4, 9], 5)
    cache.release(good, [1, 2, 3, 4, 9], 5)
    assert cache.take_edits() == ((), (shared,))
    assert cache.lookup(cache.new_chain(), [1, 2, 3, 4, 9]).num_tokens == 0
    cache.audit([])


def test_reset_forgets_everything_but_keeps_running_blocks():
    cache = make_cache(num_blocks=8)
    run_once(cache, [1, 2, 3, 4, 5])
    chain, _ = start(cache, [1, 2, 3, 4, 6])
    cache.take_edits()
    cache.end_step()
    cache.reset_prefix_cache()
    assert cache.lookup(cache.new_chain(), [1, 2, 3, 4, 5]).num_tokens == 0
    assert (cache.num_cached_blocks, len(chain.block_table)) == (0, 2)
    cache.audit([chain])


def test_growth_is_by_whole_blocks_and_refused_without_harm():
    cache = make_cache(num_blocks=4)
    chain, _ = start(cache, [1, 2, 3, 4])
    for count, blocks in ((4, 1), (5, 2), (8, 2), (12, 3)):
        cache.grow(chain, count)
        assert len(chain.block_table) == blocks
    assert chain.block_table == [1, 2, 3]
    with pytest.raises(KVCacheFull):
        cache.grow(chain, 13)
    assert chain.block_table == [1, 2, 3]


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
def test_capacity_is_one_number(num_blocks, ranks, block_size, num_tokens):
    cache = make_cache(num_blocks, ranks=ranks, block_size=block_size)
    assert cache.usable_tokens == (num_blocks - 1) * ranks * block_size
    hit = cache.lookup(cache.new_chain(), [1] * num_tokens)
    assert (cache.fitting(hit, num_tokens) is not None) == (num_tokens <= cache.usable_tokens)


@given(st.lists(TOKENS, min_size=1, max_size=4))
def test_pages_stay_below_the_ceiling(prompts):
    cache = make_cache(ranks=3, block_size=1)
    chains = [start(cache, tokens)[0] for tokens in prompts]
    for chain, tokens in zip(chains, prompts, strict=True):
        assert len(chain.block_table) == -(-len(tokens) // 3)


def test_audit_sees_a_leak():
    cache = make_cache()
    chain, _ = start(cache, [1, 2, 3])
    cache.audit([chain])
    with pytest.raises(AssertionError, match="block 1 counts 1 owners, has 0"):
        cache.audit([])
