"""The longest prefix of one group, against a search by definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.config.visibility import FULL, Visibility
from heddle.kvcache.chain import BlockChain, block_tokens
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.keys import chain_key
from heddle.kvcache.lookup import GroupLookup, longest_common
from heddle.kvcache.prefix import Node, PrefixIndex
from heddle.layout.kv import KVLayout
from tests.support.visible import seen_by

RULES = st.one_of(
    st.just(FULL),
    st.builds(Visibility, st.just("window"), st.integers(1, 7), num_first=st.integers(0, 4)),
    st.builds(Visibility, st.just("chunk"), st.integers(1, 7)),
)
PROMPT = list(range(30))


class Half:
    """A part that can go on from even prefixes only."""

    def best(self, end: int) -> int:
        return end // 2 * 2


class Third:
    def best(self, end: int) -> int:
        return end // 3 * 3


@given(st.integers(0, 50))
def test_the_common_prefix_suits_everybody_and_is_the_longest(limit: int) -> None:
    assert longest_common([Half(), Third()], limit) == limit // 6 * 6
    assert longest_common([], limit) == limit


@given(
    RULES,
    st.integers(1, 4),
    st.sets(st.integers(0, 29)),
    st.lists(st.integers(0, 4), min_size=30, max_size=30),
    st.integers(0, 30),
    st.booleans(),
)
def test_a_group_goes_on_from_where_all_that_will_be_seen_is_there(
    rule: Visibility, unit: int, present: set[int], tails: list[int], end: int, whole: bool
) -> None:
    spec = GroupSpec(rule, KVLayout(1, 1, unit))
    index, key = PrefixIndex(), b"root"
    for block in range(30 // unit):
        tokens = block_tokens(PROMPT, block, unit, 30)
        held = tokens if block in present else tokens[: tails[block]]
        if held:
            index.insert(block + 1, Node(key, held, is_first=block == 0))
        key = chain_key(key, tokens)
    num_there = [unit if at in present else min(tails[at], unit) for at in range(30 // unit)]
    num_there.append(0)

    def suits(x: int) -> bool:
        if x % unit and (whole or num_there[x // unit] < x % unit):
            return False
        firsts = -(-rule.num_first // unit)
        seen = {
            at // unit
            for query in range(x, x + 20)
            for at in seen_by(spec.visibility, query)
            if at < x
        }
        seen |= set(range(min(firsts, x // unit)))
        return all(num_there[block] == unit for block in seen if block < x // unit)

    lookup = GroupLookup(spec, BlockChain(root=b"root"), index, PROMPT, 30, whole_blocks=whole)
    best = lookup.best(end)
    assert best == max((x for x in range(end + 1) if suits(x)), default=0)
    hit = lookup.hit(best)
    assert (len(hit.blocks), hit.num_copied) == divmod(best, unit)
    assert all(block in (0, at + 1) for at, block in enumerate(hit.blocks))
    assert not hit.num_copied or hit.copy_source == best // unit + 1
