"""The manager by its laws: hits, copies, reuse, counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.visibility import FULL, Visibility
from heddle.errors import KVCacheFull
from heddle.kvcache.copies import BlockCopy, CacheEdits
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.hits import NoHit
from heddle.kvcache.keys import CacheIdentity, CacheScope
from heddle.kvcache.manager import KVCacheManager
from heddle.layout.cache_need import UNBOUNDED_TOKENS
from heddle.layout.kv import KVLayout
from tests.kvcache.fake_rows import FakeRows
from tests.support.visible import seen_by

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
IDENTITY = CacheIdentity(model="m", kv_cache_dtype="float32", layout_fingerprint=1)
NOTHING = CacheEdits()


def spec(rule=FULL, ranks=2, block_size=2):
    return GroupSpec(rule, KVLayout(world_size=ranks, interleave_size=1, block_size=block_size))


def make_cache(
    num_blocks=100, *, ranks=2, block_size=2, caching=True, groups=None, max_step_rows=64, **more
):
    return KVCacheManager(
        num_blocks=num_blocks,
        groups=groups or [spec(ranks=ranks, block_size=block_size)],
        identity=IDENTITY,
        max_step_rows=max_step_rows,
        enable_prefix_caching=caching,
        **more,
    )


def start(cache, tokens, salt=None):
    """Look up and start one sequence, its blocks taken; returns it with its hit."""
    sequence = cache.new_sequence(CacheScope(salt=salt))
    hit = cache.fitting(cache.lookup(sequence, tokens), len(tokens))
    assert hit is not None
    cache.start(sequence, hit, len(tokens))
    cache.grow(sequence, len(tokens))
    return sequence, hit


def end_step(cache):
    cache.end_step(cache.take_edits().copies)


def run_once(cache, tokens, salt=None):
    """A sequence that is computed and ends; returns its hit."""
    sequence, hit = start(cache, tokens, salt)
    end_step(cache)
    cache.commit(sequence, tokens, len(tokens))
    cache.release(sequence, tokens, len(tokens))
    return hit


def lookup(cache, tokens, salt=None, **options):
    return cache.lookup(cache.new_sequence(CacheScope(salt=salt)), tokens, **options)


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
    hit = lookup(cache, prompt)
    shared = max(shared_len(tokens, prompt) for tokens in past)
    assert hit.num_tokens == min(shared, len(prompt) - 1)
    assert (hit.reason is None) == (hit.num_tokens > 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_shares_around_a_virtual_block(ranks, extra):
    cache = make_cache(ranks=ranks, block_size=8)
    unit = 8 * ranks
    run_once(cache, [1] * (unit + extra) + [2] * 40)
    hit = lookup(cache, [1] * (unit + extra) + [3] * 40)
    assert hit.num_tokens == unit + extra
    assert len(hit.groups[0].blocks) == (unit + extra) // unit


def test_salts_do_not_see_each_other():
    cache = make_cache()
    run_once(cache, [1, 2, 3, 4, 5, 6], salt="a")
    assert lookup(cache, [1, 2, 3, 4, 5, 6], "b").reason is NoHit.NOTHING_SHARED
    assert lookup(cache, [1, 2, 3, 4, 5, 6], "a").num_tokens == 5


def test_the_copy_of_a_tail_says_which_rows_go_where_and_pins_its_source():
    cache = make_cache(num_blocks=5)
    run_once(cache, [1, 2, 3, 4, 5, 6, 7])
    sequence, hit = start(cache, [1, 2, 3, 4, 5, 6, 9])
    (part,) = hit.groups
    assert (len(part.blocks), part.num_copied) == (1, 2)
    target = sequence.block_tables[0][1]
    source = part.copy_source
    copy = BlockCopy(source_block=source, target_block=target, start=4, end=6)
    edits = cache.take_edits()
    assert edits == CacheEdits(copies=(copy,))
    assert cache.take_edits() == NOTHING
    assert (cache.num_cached_blocks, cache.num_available_blocks) == (0, 1)
    cache.audit([sequence])
    cache.end_step(edits.copies)
    assert (cache.num_cached_blocks, cache.num_available_blocks) == (1, 2)
    assert target != source


def test_a_source_is_let_go_when_its_own_step_ends():
    cache = make_cache(num_blocks=9)
    run_once(cache, [1, 2, 3])
    start(cache, [1, 2, 9])
    first = cache.take_edits()
    start(cache, [1, 2, 8])
    second = cache.take_edits()
    assert first.copies[0].source_block == second.copies[0].source_block
    cache.end_step(first.copies)
    assert cache.num_cached_blocks == 0, "the second copy still needs it"
    cache.end_step(second.copies)
    assert cache.num_cached_blocks == 1


def test_in_a_full_pool_the_copy_is_given_up_and_the_reason_has_numbers():
    cache = make_cache(num_blocks=3)
    run_once(cache, [1, 2, 3])
    tokens = [1, 2, 9, 9, 9, 9, 9, 9]
    sequence, hit = start(cache, tokens)
    assert (hit.num_tokens, hit.explain()) == (0, "shared less than the unit: 2 shared, unit 4")
    assert sorted(sequence.block_tables[0]) == [1, 2]
    assert cache.take_edits() == NOTHING


def test_each_zero_hit_has_its_reason():
    cache = make_cache(num_blocks=3)
    assert lookup(cache, [1, 2, 3]).reason is NoHit.NOTHING_SHARED
    run_once(cache, [1, 2, 3, 4, 5])
    assert lookup(cache, [1, 2, 3]).reason is None
    assert lookup(cache, [1, 2], excluded=True).reason is NoHit.EXCLUDED
    run_once(cache, [9] * 8)
    assert lookup(cache, [1, 2, 3, 4, 5]).reason is NoHit.EVICTED
    assert lookup(cache, [7, 7, 7]).reason is NoHit.NOTHING_SHARED
    off = make_cache(caching=False)
    run_once(off, [1, 2, 3, 4, 5])
    assert lookup(off, [1, 2, 3]).reason is NoHit.EXCLUDED
    assert off.num_cached_blocks == 0


def test_six_units_a_then_b_that_evicts_then_a_again():
    cache = make_cache(num_blocks=7, block_size=4)
    rows = FakeRows(7, cache.groups)

    def run(tokens):
        sequence, hit = start(cache, tokens)
        rows.spoil(sequence.block_tables[0][len(hit.groups[0].blocks) :])
        edits = cache.take_edits()
        rows.edit(edits)
        rows.write(sequence, tokens, hit.num_tokens, len(tokens))
        cache.end_step(edits.copies)
        cache.release(sequence, tokens, len(tokens))
        return hit.num_tokens

    first, second = list(range(16)), list(range(100, 140))
    # A's tail block went, its head did not.
    assert [run(first), run(second), run(first)] == [0, 0, 8]
    assert run(second) < 40


def test_content_is_found_only_after_the_step_that_wrote_it():
    cache = make_cache()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    sequence, _ = start(cache, tokens)
    assert lookup(cache, tokens).num_tokens == 0
    end_step(cache)
    cache.commit(sequence, tokens, 5)
    assert lookup(cache, tokens).num_tokens == 4
    cache.release(sequence, tokens, 7)
    assert lookup(cache, tokens).num_tokens == 7


def test_a_parent_computed_anew_finds_its_old_child():
    cache = make_cache(num_blocks=6)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    run_once(cache, tokens)
    cache._pool.share(2)  # the child stays while the pool is emptied around it
    run_once(cache, [9] * 16)
    assert lookup(cache, [*tokens, 9]).reason is NoHit.EVICTED
    run_once(cache, [*tokens[:4], 7])
    assert lookup(cache, [*tokens, 9]).num_tokens == 8


def test_quarantined_blocks_are_lost_to_lookups_and_wiped_when_the_last_owner_leaves():
    cache = make_cache()
    tokens = [1, 2, 3, 4, 5, 6]
    run_once(cache, tokens)
    bad, _ = start(cache, tokens)
    good, _ = start(cache, [1, 2, 3, 4, 9])
    shared, own = bad.block_tables[0]
    assert good.block_tables[0][0] == shared
    end_step(cache)
    cache.quarantine(bad)
    assert cache.take_edits() == CacheEdits(wiped_blocks=(own,))
    assert lookup(cache, tokens).num_tokens == 0
    cache.commit(good, [1, 2, 3, 4, 9], 5)
    cache.release(good, [1, 2, 3, 4, 9], 5)
    assert cache.take_edits() == CacheEdits(wiped_blocks=(shared,))
    assert lookup(cache, [1, 2, 3, 4, 9]).num_tokens == 0
    cache.audit([])


def test_reset_forgets_everything_but_keeps_running_blocks():
    cache = make_cache(num_blocks=8)
    run_once(cache, [1, 2, 3, 4, 5])
    sequence, _ = start(cache, [1, 2, 3, 4, 6])
    end_step(cache)
    cache.reset_prefix_cache()
    assert lookup(cache, [1, 2, 3, 4, 5]).num_tokens == 0
    assert (cache.num_cached_blocks, len(sequence.block_tables[0])) == (0, 2)
    cache.audit([sequence])


def test_growth_is_by_whole_blocks_and_refused_without_harm():
    cache = make_cache(num_blocks=4)
    sequence, _ = start(cache, [1, 2, 3, 4])
    for count, blocks in ((4, 1), (5, 2), (8, 2), (12, 3)):
        cache.grow(sequence, count)
        assert len(sequence.block_tables[0]) == blocks
    assert sequence.block_tables[0] == [1, 2, 3]
    with pytest.raises(KVCacheFull):
        cache.grow(sequence, 13)
    assert sequence.block_tables[0] == [1, 2, 3]


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
def test_capacity_is_one_number(num_blocks, ranks, block_size, num_tokens):
    cache = make_cache(num_blocks, ranks=ranks, block_size=block_size)
    assert cache.usable_tokens == (num_blocks - 1) * ranks * block_size
    hit = lookup(cache, [1] * num_tokens)
    assert (cache.fitting(hit, num_tokens) is not None) == (num_tokens <= cache.usable_tokens)


@given(st.lists(TOKENS, min_size=1, max_size=4))
def test_pages_stay_below_the_ceiling(prompts):
    cache = make_cache(ranks=3, block_size=1)
    sequences = [start(cache, tokens)[0] for tokens in prompts]
    for sequence, tokens in zip(sequences, prompts, strict=True):
        assert len(sequence.block_tables[0]) == -(-len(tokens) // 3)


def test_audit_sees_a_leak():
    cache = make_cache()
    sequence, _ = start(cache, [1, 2, 3])
    cache.audit([sequence])
    with pytest.raises(AssertionError, match="block 1 counts 1 owners, has 0"):
        cache.audit([])


# Windows.

WINDOW = Visibility("window", 5)
RULES = st.sampled_from(
    [
        Visibility("window", 1),
        WINDOW,
        Visibility("window", 3, num_first=3),
        Visibility("chunk", 6),
        Visibility("chunk", 4),
    ]
)


def run_in_pieces(cache, tokens, size, check=lambda sequence, computed: None):
    """A sequence that is computed `size` rows at a time and stays."""
    sequence = cache.new_sequence()
    hit = cache.fitting(cache.lookup(sequence, tokens), len(tokens))
    cache.start(sequence, hit, len(tokens))
    computed = hit.num_tokens
    while computed < len(tokens):
        end = min(computed + size, len(tokens))
        cache.grow(sequence, end)
        end_step(cache)
        cache.commit(sequence, tokens, end)
        computed = end
        check(sequence, computed)
    return sequence, hit


@given(RULES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 40))
def test_a_block_goes_back_exactly_when_no_query_to_come_sees_it(
    rule, ranks, block_size, size, length
):
    cache = make_cache(
        groups=[spec(), spec(rule, ranks, block_size)], max_step_rows=7, caching=False
    )
    window, unit = cache.groups[1], ranks * block_size

    def check(sequence, computed):
        future = {at for query in range(computed, 80) for at in seen_by(window.visibility, query)}
        wanted = [
            any(at in future for at in range(block * unit, (block + 1) * unit))
            for block in range(-(-computed // unit))
        ]
        # A block of first tokens stays although later a window may skip over it.
        firsts = -(-rule.num_first // unit)
        for block, (held, due) in enumerate(zip(sequence.block_tables[1], wanted, strict=True)):
            assert (held > 0) == (due or block < firsts)
        assert 0 not in sequence.block_tables[0]
        cache.audit([sequence])

    sequence, _ = run_in_pieces(cache, list(range(length)), size, check)
    cache.release(sequence, list(range(length)), length)
    cache.audit([])
    assert cache.num_available_blocks == cache.num_usable_blocks


@given(RULES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 60))
def test_a_started_prompt_always_gets_its_blocks(rule, block_size, size, num_blocks, length):
    cache = make_cache(num_blocks, groups=[spec(rule, 1, block_size)], max_step_rows=size)
    tokens = list(range(length))
    others = []
    for _ in range(9):
        sequence = cache.new_sequence()
        hit = cache.fitting(cache.lookup(sequence, tokens, excluded=True), length)
        if hit is None:
            break
        cache.start(sequence, hit, length)
        others.append(sequence)
    assert bool(others) == (length <= cache.usable_tokens)
    computed = 0
    while computed < length:
        computed = min(computed + size, length)
        for sequence in others:
            cache.grow(sequence, computed)
        for sequence in others:
            cache.commit(sequence, tokens, computed)
        cache.audit(others)


def test_a_window_keeps_a_promise_and_no_more():
    cache = make_cache(9, groups=[spec(Visibility("window", 4), 1, 2)], max_step_rows=4)
    sequence = cache.new_sequence()
    cache.start(sequence, lookup(cache, [7] * 20), 20)
    # Keys 17 .. 23 touch at most 4 blocks of 2; none is taken yet.
    assert (cache.num_available_blocks, sequence.block_tables) == (8 - 4, ([],))
    cache.grow(sequence, 4)
    assert cache.num_available_blocks == 8 - 4
    cache.commit(sequence, [7] * 20, 4)
    assert cache.num_available_blocks == 8 - 4
    cache.grow(sequence, 14)  # more rows than were promised for: the rest is asked for
    assert cache.num_available_blocks == 8 - 7
    with pytest.raises(KVCacheFull, match="2 blocks wanted, 1 of 8 available"):
        cache.grow(sequence, 17)
    cache.commit(sequence, [7] * 20, 14)
    assert cache.num_available_blocks == 8 - 4
    cache.grow(sequence, 17)
    cache.commit(sequence, [7] * 20, 17)
    cache.grow(sequence, 20)
    cache.commit(sequence, [7] * 20, 20)  # from here on a row at a time
    assert cache.num_available_blocks == 8 - 3


@pytest.mark.parametrize("first", [0, 3])
def test_a_hybrid_hit_needs_the_window_where_it_ends(first):
    rule = Visibility("window", 4, num_first=first)
    cache = make_cache(40, groups=[spec(ranks=1), spec(rule, 1, 2)], max_step_rows=8)
    tokens = list(range(20))
    run_once(cache, tokens)
    sequence, hit = start(cache, [*tokens, 99])
    assert hit.num_tokens == 20
    firsts = -(-first // 2)
    table = sequence.block_tables[1]
    assert [block > 0 for block in table] == [
        index < firsts or index >= 8 for index in range(len(table))
    ]
    assert all(sequence.block_tables[0])


def test_a_hybrid_hit_falls_back_to_where_the_window_survives():
    cache = make_cache(40, groups=[spec(ranks=1), spec(Visibility("window", 4), 1, 2)])
    tokens = list(range(20))
    run_once(cache, tokens)
    end = start(cache, [*tokens[:16], 77])[0].block_tables[1]  # reads 13 .. 15 and more
    gone = end[7]  # positions 14 and 15
    cache._pool._index.drop(gone)
    hit = lookup(cache, [*tokens, 99])
    # Positions 14, 15 are needed by every end from 15 to 18; 19 needs 16 .. 18.
    assert hit.num_tokens == 20
    shorter = lookup(cache, tokens[:18])
    assert shorter.num_tokens == 14
    for block in [node for node in cache._pool._index._nodes if node in end]:
        cache._pool._index.drop(block)
    assert lookup(cache, tokens[:18]).num_tokens < 14


def test_what_a_window_gave_back_can_be_found_until_it_is_evicted():
    cache = make_cache(40, groups=[spec(Visibility("window", 4), 1, 2)], max_step_rows=4)
    tokens = list(range(16))
    run_in_pieces(cache, tokens, 4)
    hit = lookup(cache, [*tokens[:8], 99])
    assert hit.num_tokens == 8
    assert [block > 0 for block in hit.groups[0].blocks] == [False, False, True, True]


@given(
    st.lists(TOKENS, min_size=1, max_size=4), TOKENS, RULES, st.integers(1, 3), st.integers(1, 5)
)
def test_a_hybrid_hit_with_room_for_all_is_what_is_shared(past, prompt, rule, block_size, size):
    cache = make_cache(
        400, groups=[spec(ranks=2), spec(rule, 1, block_size), spec(rule, 3, 1)], max_step_rows=5
    )
    for tokens in past:
        sequence, _ = run_in_pieces(cache, tokens, size)
        cache.release(sequence, tokens, len(tokens))
    shared = max(shared_len(tokens, prompt) for tokens in past)
    hit = lookup(cache, prompt)
    assert hit.num_tokens == min(shared, len(prompt) - 1)
    for part, group in zip(hit.groups, cache.groups, strict=True):
        assert len(part.blocks) == hit.num_tokens // group.unit
        assert part.num_copied == hit.num_tokens % group.unit


def test_windows_alone_bound_no_length():
    cache = make_cache(7, groups=[spec(Visibility("window", 4), 1, 2)], max_step_rows=4)
    assert cache.usable_tokens == UNBOUNDED_TOKENS
    tight = make_cache(4, groups=[spec(Visibility("window", 4), 1, 2)], max_step_rows=4)
    assert tight.usable_tokens == 6
    both = make_cache(10, groups=[spec(), spec(Visibility("window", 4), 1, 2)], max_step_rows=4)
    assert both.usable_tokens == (9 - 4) * 4


# Start ranks.


def test_chains_inherit_the_rank_of_their_hit_and_others_start_where_least_lies():
    cache = make_cache(groups=[spec(ranks=3, block_size=4)], rotates=True)
    first, _ = start(cache, [1] * 4)
    second, _ = start(cache, [2] * 4)
    third, _ = start(cache, [3] * 4)
    assert [first.start_rank, second.start_rank, third.start_rank] == [0, 1, 2]
    end_step(cache)
    cache.release(second, [2] * 4, 4)
    heir, hit = start(cache, [2, 2, 2, 5])
    assert (heir.start_rank, hit.num_tokens, hit.start_rank) == (1, 3, 1)
    (copy,) = cache.take_edits().copies
    assert copy.start_rank == 1
    cache.audit([first, third, heir])


def test_a_group_of_one_rank_never_rotates():
    groups = [spec(ranks=2, block_size=4), spec(Visibility("window", 3), 1, 4)]
    cache = make_cache(groups=groups, rotates=True)
    start(cache, [1])
    end_step(cache)
    second, _ = start(cache, [2, 2, 2])
    assert second.start_rank == 1
    cache.release(second, [2, 2, 2], 3)
    start(cache, [2, 2, 9])
    assert [copy.start_rank for copy in cache.take_edits().copies] == [1, 0]
