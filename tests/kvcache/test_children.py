from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.kvcache.children import Children, common_prefix_len

WORDS = st.lists(st.integers(0, 2), max_size=5).map(tuple)


def shared_len(left, right):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(WORDS, WORDS)
def test_common_prefix_len_counts(left, right):
    assert common_prefix_len(left, right) == shared_len(left, right)


@given(st.lists(WORDS, max_size=12), st.lists(WORDS, max_size=4), WORDS)
def test_longest_and_covering_equal_a_scan(words, removed, query):
    children, kept = Children(), []
    for block, word in enumerate(words, start=1):
        children.add(b"p", word, block)
        kept.append((word, block))
    for word, block in [entry for entry in kept if entry[0] in removed]:
        children.remove(b"p", word, block)
        kept.remove((word, block))
    block, shared = children.longest(b"p", query)
    assert shared == max((shared_len(word, query) for word, _ in kept), default=0)
    if shared:
        assert shared_len({b: w for w, b in kept}[block], query) == shared
    else:
        assert block == 0
    covering = children.covering(b"p", query)
    beginning = {b for word, b in kept if word[: len(query)] == query}
    assert (covering in beginning) if beginning else covering is None


def test_parents_are_apart():
    children = Children()
    children.add(b"p", (1, 2), 4)
    assert children.longest(b"q", (1, 2)) == (0, 0)
    assert children.covering(b"q", (1,)) is None
