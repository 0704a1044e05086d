from __future__ import annotations

from heddle.kvcache.prefix import MAX_GHOSTS, Node, PrefixIndex


def node(*tokens, parent=b"root", is_first=True):
    return Node(parent, tokens, is_first)


def test_a_second_block_with_the_same_or_fewer_tokens_is_no_news():
    index = PrefixIndex()
    assert index.insert(1, node(1, 2, 3))
    assert not index.insert(2, node(1, 2, 3))
    assert not index.insert(3, node(1, 2))
    assert index.insert(4, node(1, 2, 3, 4))
    assert (1 in index, 2 in index, 3 in index, 4 in index) == (True, False, False, True)


def test_a_dropped_block_is_not_found():
    index = PrefixIndex()
    index.insert(1, node(1, 2))
    assert index.drop(1) == node(1, 2)
    assert index.full(b"root", (1, 2)) is None
    assert index.longest(b"root", (1, 2)) == (0, 0)
    assert len(index) == 0


def test_a_child_outlives_its_parent():
    index = PrefixIndex()
    index.insert(1, node(1, 2))
    index.insert(2, node(3, 4, parent=b"key of 1 2", is_first=False))
    index.evict(1)
    assert index.full(b"key of 1 2", (3, 4)) == 2


def test_only_evicted_first_blocks_leave_ghosts():
    index = PrefixIndex()
    for block, first in ((1, True), (2, False), (3, True)):
        index.insert(block, node(block, is_first=first))
    index.evict(1)
    index.evict(2)
    index.drop(3)
    assert [index.was_evicted(b"root", (token, 9)) for token in (1, 2, 3)] == [True, False, False]
    assert not index.was_evicted(b"other root", (1,))


def test_ghosts_are_bounded_and_the_oldest_go_first():
    index = PrefixIndex()
    for token in range(MAX_GHOSTS + 2):
        index.insert(1, node(token))
        index.evict(1)
    found = [token for token in range(MAX_GHOSTS + 2) if index.was_evicted(b"root", (token,))]
    assert found == list(range(2, MAX_GHOSTS + 2))
