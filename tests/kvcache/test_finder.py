"""A prompt is looked up under the names of every start rank, and nothing is taken."""

from __future__ import annotations

import pytest

from heddle.config.visibility import FULL, Visibility
from heddle.kvcache.finder import PrefixFinder
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.keys import COMMON, CacheIdentity, CacheScope
from heddle.kvcache.prefix import Node, PrefixIndex
from heddle.kvcache.state_cache import StateCache
from heddle.layout.kv import KVLayout

RANKS = 3
GROUPS = (
    GroupSpec(FULL, KVLayout(RANKS, 1, 1)),
    GroupSpec(Visibility("window", 9), KVLayout(1, 1, 3)),
)
PROMPT = (1, 2, 3, 4, 5, 6, 7)


def create(index: PrefixIndex, groups=GROUPS, num_slots: int = 0) -> PrefixFinder:
    identity = CacheIdentity(model="m", kv_cache_dtype="f", layout_fingerprint=0)
    return PrefixFinder(groups, index, StateCache(num_slots, 1, 4), identity, RANKS)


def store(index: PrefixIndex, finder: PrefixFinder, rank: int, tokens: tuple[int, ...]) -> None:
    """A block of the first group as a sequence on `rank` leaves it."""
    chain = finder.chains(finder.new_sequence(COMMON), rank)[0]
    index.insert(len(index) + 1, Node(chain.root, tokens, is_first=True))


@pytest.mark.parametrize("rank", range(RANKS))
def test_content_is_found_on_the_rank_where_its_chain_starts(rank: int) -> None:
    index = PrefixIndex()
    finder = create(index, GROUPS[:1])
    store(index, finder, rank, PROMPT[:3])
    hit = finder.find(finder.new_sequence(COMMON), PROMPT)
    assert (hit.num_tokens, hit.start_rank, hit.groups[0].blocks) == (3, rank, (1,))
    assert len(index) == 1


def test_the_longest_hit_wins_and_the_lowest_rank_of_equals() -> None:
    index = PrefixIndex()
    finder = create(index, GROUPS[:1])
    for rank, tokens in ((2, PROMPT[:3]), (1, PROMPT[:3]), (0, PROMPT[:2])):
        store(index, finder, rank, tokens)
    hit = finder.find(finder.new_sequence(COMMON), PROMPT)
    assert (hit.num_tokens, hit.start_rank, hit.whole) == (3, 1, None)


def test_a_hit_with_a_copy_carries_the_best_one_without() -> None:
    index = PrefixIndex()
    finder = create(index, GROUPS[:1])
    store(index, finder, 1, PROMPT[:2])
    hit = finder.find(finder.new_sequence(COMMON), PROMPT)
    assert (hit.num_tokens, hit.num_copied) == (2, 2)
    assert hit.whole is not None
    assert (hit.whole.num_tokens, hit.whole.start_rank) == (0, 1)


def test_names_differ_by_salt_and_group_and_by_rank_where_ranks_share() -> None:
    finder = create(PrefixIndex())
    roots = {
        (salt, rank, group): chain.root
        for salt in (None, "a")
        for rank in range(RANKS)
        for group, chain in enumerate(
            finder.chains(finder.new_sequence(CacheScope(salt=salt)), rank)
        )
    }
    assert len({roots[salt, rank, 0] for salt in (None, "a") for rank in range(RANKS)}) == 6
    assert len({roots[None, rank, 1] for rank in range(RANKS)}) == 1  # stored whole on each rank
    assert roots[None, 0, 0] != roots[None, 0, 1] != roots["a", 0, 1]


def test_chains_are_made_once_and_states_only_where_layers_have_some() -> None:
    finder = create(PrefixIndex())
    blocks = finder.new_sequence(COMMON)
    assert finder.chains(blocks, 2) is finder.chains(blocks, 2)
    assert finder.chains(blocks, 0) is blocks.chains
    assert blocks.states is None
    states = create(PrefixIndex(), num_slots=4).new_sequence(COMMON).states
    assert states is not None
    assert states.slots == []
