"""The pool against a model that keeps one state per block."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from heddle.errors import KVCacheFull
from heddle.kvcache.blocks import BlockPool
from heddle.kvcache.prefix import Node, PrefixIndex

NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.pool = BlockPool(NUM_BLOCKS, self.index)
        self.owners = {}  # block -> owners
        self.known = set()  # blocks whose content can be found
        self.cached = []  # least recently used first
        self.suspect = set()
        self.to_wipe = []
        self.num_contents = 0

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.owners)))

    @rule(count=st.integers(0, NUM_BLOCKS), after=st.none() | st.integers(1, NUM_BLOCKS))
    def allocate(self, count, after):
        free = NUM_BLOCKS - 1 - len(self.owners) - len(self.cached)
        if count > free + len(self.cached):
            with pytest.raises(KVCacheFull, match=rf"{count} blocks wanted, .* of 6 available"):
                self.pool.allocate(count, after)
            return
        blocks = self.pool.allocate(count, after)
        evicted, self.cached = (
            self.cached[: max(count - free, 0)],
            self.cached[max(count - free, 0) :],
        )
        self.known -= set(evicted)
        assert len(set(blocks)) == count
        assert not set(blocks) & (set(self.owners) | set(self.cached) | {0})
        self.owners.update(dict.fromkeys(blocks, 1))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data):
        block = self.pick(data)
        self.pool.share(block)
        self.owners[block] += 1

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share_cached(self, data):
        block = data.draw(st.sampled_from(self.cached))
        self.pool.share(block)
        self.cached.remove(block)
        self.owners[block] = 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        self.release_one(self.pick(data))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fill_and_release(self, data):
        block = self.pick(data)
        self.register_one(block)
        for _ in range(self.owners[block]):
            self.release_one(block)

    def release_one(self, block):
        self.pool.release(block)
        self.owners[block] -= 1
        if not self.owners[block]:
            del self.owners[block]
            if block in self.known:
                self.cached.append(block)
            elif block in self.suspect:
                self.suspect.remove(block)
                self.to_wipe.append(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def register(self, data):
        self.register_one(self.pick(data))

    def register_one(self, block):
        self.num_contents += 1
        self.pool.register(block, Node(b"root", (self.num_contents,), True))
        if block not in self.suspect:
            self.known.add(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def quarantine(self, data):
        block = self.pick(data)
        self.pool.quarantine(block)
        self.known.discard(block)
        self.suspect.add(block)

    @precondition(lambda self: self.to_wipe)
    @rule()
    def take_to_wipe(self):
        assert self.pool.take_to_wipe() == tuple(self.to_wipe)
        self.to_wipe = []
        assert self.pool.take_to_wipe() == ()

    @precondition(lambda self: len(self.cached) > 2)
    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.known.clear()
        self.cached.clear()

    @invariant()
    def every_block_is_counted_once(self):
        self.pool.audit()
        assert [self.pool.references(b) for b in range(NUM_BLOCKS)] == [
            self.owners.get(b, 0) for b in range(NUM_BLOCKS)
        ]
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_available == NUM_BLOCKS - 1 - len(self.owners)
        assert {b for b in range(NUM_BLOCKS) if b in self.index} == self.known


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_equal_content_is_registered_once():
    index = PrefixIndex()
    pool = BlockPool(4, index)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.register(block, Node(b"root", (1, 2), True))
        pool.release(block)
    assert (pool.num_cached, pool.num_available) == (1, 3)
    assert index.full(b"root", (1, 2)) == first


@pytest.mark.parametrize("size", [0, 1])
def test_a_pool_of_the_reserved_block_alone_has_nothing_to_give(size):
    pool = BlockPool(size, PrefixIndex())
    pool.audit()
    assert (pool.num_usable, pool.allocate(0)) == (0, [])
    with pytest.raises(KVCacheFull, match="1 blocks wanted, 0 of 0 available"):
        pool.allocate(1)


def test_audit_sees_a_hash_that_outlives_its_block():
    index = PrefixIndex()
    pool = BlockPool(4, index)
    index.insert(2, Node(b"root", (1,), True))
    with pytest.raises(AssertionError, match="free block 2 can be found"):
        pool.audit()
