"""Why a search finds nothing, part by part; what it finds is tested with the manager."""

from __future__ import annotations

import pytest

from heddle.config.visibility import FULL, Visibility
from heddle.kvcache.chain import BlockChain
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.hits import NoHit
from heddle.kvcache.prefix import Node, PrefixIndex
from heddle.kvcache.search import PrefixSearch
from heddle.kvcache.states import Prefix, StateLookup, StatePool
from heddle.layout.kv import KVLayout

FULL_GROUP = GroupSpec(FULL, KVLayout(1, 1, 4))
WINDOW_GROUP = GroupSpec(Visibility("window", 3), KVLayout(1, 1, 2))
PROMPT = (1, 2, 3, 4, 5)


def search(index, specs, pool=None, unit=4):
    names = [str(at).encode() for at in range(len(specs))]
    states = None if pool is None else StateLookup(pool, BlockChain(b"s"), unit, PROMPT)
    return PrefixSearch(
        specs,
        [BlockChain(name) for name in names],
        index,
        states=states,
        state_unit=unit,
        tokens=PROMPT,
        start_rank=2,
    )


def index_of(*nodes):
    index = PrefixIndex()
    for block, (root, tokens) in enumerate(nodes, start=1):
        index.insert(block, Node(root, tokens, is_first=True))
    return index


@pytest.mark.parametrize("held", [3, 4])
def test_what_only_full_attention_has_counts_as_evicted(held):
    index = index_of((b"0", PROMPT[:held]))
    hit = search(index, [FULL_GROUP, WINDOW_GROUP]).find()
    assert (hit.num_tokens, hit.reason) == (0, NoHit.EVICTED)


@pytest.mark.parametrize(
    ("unit", "reason", "num_dropped"), [(4, "BELOW_UNIT", 3), (3, "EVICTED", 0)]
)
def test_a_missing_snapshot_says_whether_there_could_be_one(unit, reason, num_dropped):
    hit = search(index_of((b"0", PROMPT[:3])), [FULL_GROUP], StatePool(3), unit).find()
    assert (hit.num_tokens, hit.reason, hit.num_dropped) == (0, NoHit[reason], num_dropped)
    assert hit.unit == 4


def test_nothing_is_shared_with_an_empty_index():
    for specs, pool in (([FULL_GROUP, WINDOW_GROUP], None), ([], StatePool(3))):
        hit = search(PrefixIndex(), specs, pool).find()
        assert (hit.num_tokens, hit.reason) == (0, NoHit.NOTHING_SHARED)
        assert len(hit.groups) == len(specs)


def test_a_hit_names_its_snapshot_and_start_rank():
    pool = StatePool(3)
    (slot,) = pool.allocate(1)
    pool.keep(slot, Prefix(b"s", PROMPT[:3]))
    hit = search(index_of((b"0", PROMPT[:4])), [FULL_GROUP], pool).find()
    assert (hit.num_tokens, hit.snapshot, hit.start_rank, hit.reason) == (3, slot, 2, None)
    assert (hit.groups[0].copy_source, hit.num_copied) == (1, 3)


def test_without_copies_only_whole_blocks_count():
    index = index_of((b"0", PROMPT[:4]))
    assert search(index, [FULL_GROUP]).find(whole_blocks=True).num_tokens == 4
    index = index_of((b"0", PROMPT[:3]))
    assert search(index, [FULL_GROUP]).find(whole_blocks=True).num_tokens == 0
    assert search(index, [FULL_GROUP]).find().num_tokens == 3
