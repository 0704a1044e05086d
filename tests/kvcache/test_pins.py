"""What is pinned stays, what is not promised is enough, and time ends it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.visibility import FULL, Visibility
from heddle.errors import ConfigError, KVCacheFull, RequestError
from heddle.kvcache.keys import CacheScope
from heddle.kvcache.pins import num_pinned_blocks
from tests.kvcache.test_manager import lookup, make_cache, run_once, spec, start

UNIT = 4  # 2 ranks, blocks of 2
WINDOW = Visibility("window", 6)


def fill(cache, seed, num_blocks):
    """Another prompt of so many blocks that came and went."""
    run_once(cache, [100 * seed + at for at in range(UNIT * num_blocks)])


def test_a_pinned_prefix_outlives_pressure_and_ends_with_its_time():
    cache = make_cache(9, max_pinned_tokens=3 * UNIT)
    tokens = list(range(1, 11))  # two blocks and a half
    run_once(cache, tokens)
    assert cache.pin(tokens, until=5.0) == 10
    assert (cache.num_pinned_blocks, cache.num_available_blocks) == (3, 5)
    for seed in range(1, 6):
        fill(cache, seed, 5)
    assert lookup(cache, [*tokens, 0]).num_tokens == 10
    cache.expire_pins(4.9)
    assert cache.num_pinned_blocks == 3
    cache.expire_pins(5.0)
    assert (cache.num_pinned_blocks, cache.num_available_blocks) == (0, 8)
    assert lookup(cache, [*tokens, 0]).num_tokens == 10, "it is cached until it is evicted"
    fill(cache, 9, 8)
    assert lookup(cache, [*tokens, 0]).num_tokens == 0


def test_a_prompt_part_way_through_pins_its_full_blocks():
    cache = make_cache(9, max_pinned_tokens=4 * UNIT)
    tokens = list(range(1, 11))
    sequence, _ = start(cache, tokens)
    cache.commit(sequence, tokens, 9)
    available = cache.num_available_blocks
    assert cache.pin(tokens, until=5.0) == 8
    assert cache.num_available_blocks == available, "it has them already"
    cache.release(sequence, tokens, 9)
    assert (cache.num_pinned_blocks, cache.num_available_blocks) == (2, 6)
    cache.audit([])


def test_the_same_prefix_again_costs_nothing_and_the_later_time_counts():
    cache = make_cache(9, max_pinned_tokens=2 * UNIT)
    tokens = list(range(1, 9))
    run_once(cache, tokens)
    for until in (3.0, 7.0, 5.0):
        assert cache.pin(tokens, until) == 8
    assert cache.pin(tokens[:4], until=9.0) == 4
    cache.expire_pins(6.0)
    assert cache.num_pinned_blocks == 2
    cache.expire_pins(7.0)
    assert cache.num_pinned_blocks == 1
    assert lookup(cache, [*tokens[:4], 0]).num_tokens == 4
    cache.expire_pins(9.0)
    assert cache.num_pinned_blocks == 0


def test_what_cannot_be_pinned_says_why_and_changes_nothing():
    tokens = list(range(1, 13))
    cache = make_cache(9)
    run_once(cache, tokens)
    with pytest.raises(RequestError, match=r"12 tokens take 3 more blocks; 0 of 0 are left, rai"):
        cache.pin(tokens, until=5.0)
    cache = make_cache(9, max_pinned_tokens=2 * UNIT)
    with pytest.raises(RequestError, match=r"nothing of it is cached \(nothing shared\)") as caught:
        cache.pin(tokens, until=5.0)
    assert caught.value.code == "pin_refused"
    run_once(cache, tokens)
    with pytest.raises(RequestError, match=r"3 more blocks; 2 of 2 are left, raised by --max-pin"):
        cache.pin(tokens, until=5.0)
    assert cache.pin(tokens[:8], until=5.0) == 8
    with pytest.raises(RequestError, match=r"1 more block; 0 of 2 are left"):
        cache.pin(tokens, until=5.0)
    assert cache.num_pinned_blocks == 2
    cache.audit([])


def test_running_requests_keep_what_they_have():
    cache = make_cache(5, groups=[spec(WINDOW)], max_step_rows=4, max_pinned_tokens=UNIT)
    tokens = list(range(1, 30))
    sequence, _ = start(cache, tokens[:4])
    cache.commit(sequence, tokens[:4], 4)
    others = [start(cache, [50 + at])[0] for at in range(cache.num_available_blocks)]
    assert cache.num_available_blocks == 0
    with pytest.raises(RequestError, match=r"4 tokens take 1 more block; running requests have"):
        cache.pin(tokens[:4], until=5.0)
    cache.audit([sequence, *others])


def test_another_scope_pins_and_finds_for_itself():
    cache = make_cache(9, max_pinned_tokens=4 * UNIT)
    tokens = list(range(1, 9))
    run_once(cache, tokens, salt="a")
    with pytest.raises(RequestError, match="nothing of it is cached"):
        cache.pin(tokens, until=5.0)
    assert cache.pin(tokens, until=5.0, scope=CacheScope(salt="a")) == 8


def test_what_is_distrusted_or_forgotten_is_no_longer_pinned():
    cache = make_cache(9, max_pinned_tokens=4 * UNIT)
    tokens = list(range(1, 9))
    run_once(cache, tokens)
    cache.pin(tokens, until=5.0)
    sequence, hit = start(cache, [*tokens, 9])
    assert hit.num_tokens == 8
    cache.quarantine(sequence)
    assert (cache.num_pinned_blocks, cache.num_available_blocks) == (0, 8)
    assert len(cache.take_edits().wiped_blocks) == 3
    run_once(cache, tokens)
    cache.pin(tokens, until=5.0)
    cache.reset_prefix_cache()
    assert (cache.num_pinned_blocks, cache.num_available_blocks) == (0, 8)
    assert lookup(cache, [*tokens, 9]).num_tokens == 0


@given(
    st.integers(3, 12),
    st.integers(1, 10),
    st.sampled_from([[FULL], [WINDOW], [FULL, WINDOW]]),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_the_longest_sequence_fits_beside_whatever_is_pinned(num_blocks, limit, rules, lengths):
    """The law that keeps an admitted request from waiting for a pin: it fits into the rest."""
    cache = make_cache(
        num_blocks,
        groups=[spec(rule) for rule in rules],
        max_step_rows=4,
        max_pinned_tokens=min(limit, num_blocks - 2) * UNIT,
    )
    longest, num_kept = min(cache.usable_tokens, 200), 0
    for seed, length in enumerate(lengths):
        tokens = [100 * seed + at for at in range(min(length, longest))]
        if not tokens:
            continue
        run_in_steps(cache, tokens)
        with suppress(RequestError):  # the limit may be met
            cache.pin(tokens, until=1.0)
        num_kept += cache.num_pinned_blocks > 0
    if rules == [FULL] and lengths[0] <= min(limit, num_blocks - 2) * UNIT <= longest:
        assert num_kept
    if longest:
        run_in_steps(cache, [9000 + at for at in range(longest)])
    cache.audit([])


def run_in_steps(cache, tokens):
    sequence = cache.new_sequence()
    hit = cache.fitting(cache.lookup(sequence, tokens), len(tokens))
    assert hit is not None, "an empty pool refused what it admits"
    cache.start(sequence, hit, len(tokens))
    done = hit.num_tokens
    while done < len(tokens):
        done = min(done + 4, len(tokens))
        cache.grow(sequence, done)
        cache.end_step(cache.take_edits().copies)
        cache.commit(sequence, tokens, done)
    if len(tokens) == cache.usable_tokens and cache.groups[0].visibility.is_full:
        with pytest.raises(KVCacheFull):
            cache.grow(sequence, len(tokens) + UNIT * (cache.num_usable_blocks + 1))
    cache.release(sequence, tokens, len(tokens))


@pytest.mark.parametrize(
    ("max_tokens", "num_usable", "has_states", "message"),
    [
        (8, 9, True, r"max_pinned_tokens=8 is not legal with recurrent layers.*\(nearest: 0\)"),
        (3, 9, False, r"max_pinned_tokens=3 .* with 9 blocks of 4 tokens.*\(nearest: 4\)"),
        (36, 9, False, r"max_pinned_tokens=36 .* with 9 blocks of 4 tokens.*\(nearest: 32\)"),
        (4, 1, False, r"max_pinned_tokens=4 .* with 1 blocks of 4 tokens.*\(nearest: 0\)"),
    ],
)
def test_a_limit_that_pins_nothing_or_everything_is_refused(
    max_tokens, num_usable, has_states, message
):
    with pytest.raises(ConfigError, match=message):
        num_pinned_blocks(max_tokens, 4, num_usable, has_states=has_states)


def test_what_a_refusal_offers_is_legal():
    assert num_pinned_blocks(0, 4, 9, has_states=True) == 0
    assert num_pinned_blocks(4, 4, 9, has_states=False) == 1
    assert num_pinned_blocks(32, 4, 9, has_states=False) == 8
    assert num_pinned_blocks(0, 4, 1, has_states=False) == 0
