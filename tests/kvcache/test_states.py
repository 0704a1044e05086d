from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.kvcache.chain import BlockChain, block_tokens
from heddle.kvcache.keys import chain_key
from heddle.kvcache.states import Prefix, StateLookup, StatePool

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def prefix_of(tokens, unit):
    key = b"root"
    for index in range(len(tokens) // unit):
        key = chain_key(key, block_tokens(tokens, index, unit, len(tokens)))
    return Prefix(key, tuple(tokens[len(tokens) // unit * unit :]))


@given(st.lists(TOKENS, max_size=6), TOKENS, st.integers(1, 4), st.integers(0, 9))
def test_a_lookup_finds_the_longest_snapshot_of_a_prefix(past, prompt, unit, end):
    pool = StatePool(9)
    slots = {}
    for tokens in past:
        (slot,) = pool.allocate(1)
        pool.keep(slot, prefix_of(tokens, unit))
        slots.setdefault(tuple(tokens), slot)
    end = min(end, len(prompt))
    fitting = [t for t in slots if len(t) <= end and tuple(prompt[: len(t)]) == t]
    best = max(fitting, key=len, default=())
    found = StateLookup(pool, BlockChain(root=b"root"), unit, prompt).find(end)
    assert found == (slots.get(best, 0), len(best))
    pool.audit([])


def test_the_least_recently_used_snapshot_goes_first():
    pool = StatePool(4)
    names = [Prefix(b"r", (at,)) for at in range(3)]
    for name, slot in zip(names, pool.allocate(3), strict=True):
        pool.keep(slot, name)
    assert pool.touch(names[0]) > 0
    pool.allocate(1)
    assert [bool(pool.touch(name)) for name in names] == [True, False, True]
    assert (pool.num_available, pool.num_snapshots) == (2, 2)


def test_a_second_snapshot_of_a_prefix_gives_its_slot_back():
    pool = StatePool(3)
    first, second = pool.allocate(2)
    pool.keep(first, Prefix(b"r", (1,)))
    pool.keep(second, Prefix(b"r", (1,)))
    assert pool.touch(Prefix(b"r", (1,))) == first
    assert pool.allocate(1) == [second]


def test_forgotten_snapshots_are_free():
    pool = StatePool(4)
    for at, slot in enumerate(pool.allocate(3)):
        pool.keep(slot, Prefix(b"r", (at,)))
    pool.forget([Prefix(b"r", (1,)), Prefix(b"r", (7,))])
    assert (pool.num_snapshots, pool.num_available) == (2, 3)
    pool.forget_all()
    assert (pool.num_snapshots, pool.num_available) == (0, 3)
    pool.audit([])


def test_slot_zero_is_never_given_out_and_audit_sees_a_leak():
    pool = StatePool(3)
    owned = pool.allocate(2)
    assert sorted(owned) == [1, 2]
    pool.audit(owned)
    with pytest.raises(AssertionError, match=r"state slots \[1\], of 1 to 2"):
        pool.audit([1])
    with pytest.raises(AssertionError, match="1 state slots wanted, 0 left"):
        pool.allocate(1)
