"""Balance of resident tokens, for 64 chats of about 1.5k tokens on 8 ranks."""

from __future__ import annotations

import math
import random

import pytest

from heddle.config.visibility import FULL, Visibility
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.keys import CacheIdentity
from heddle.kvcache.manager import KVCacheManager
from heddle.kvcache.rotation import least_loaded, num_start_ranks
from heddle.kvcache.sequence import SequenceBlocks
from heddle.layout.kv import KVLayout

NUM_RANKS = 8


def imbalance(interleave: int, rotates: bool, seed: int) -> float:
    """Largest over mean of resident tokens; median length 1k, mean 1.5k."""
    draw = random.Random(seed)
    cache = KVCacheManager(
        num_blocks=1 << 14,
        groups=[GroupSpec(FULL, KVLayout(NUM_RANKS, interleave, interleave))],
        identity=CacheIdentity(model="m", kv_cache_dtype="f", layout_fingerprint=0),
        max_step_rows=512,
        enable_prefix_caching=False,
        rotates=rotates,
    )
    loads = [0] * NUM_RANKS
    for number in range(64):
        length = max(int(draw.lognormvariate(math.log(1000), 0.9)), 1)
        tokens = [number] * length
        sequence = cache.new_sequence()
        cache.start(sequence, cache.lookup(sequence, tokens), length)
        for position in range(length):  # counted, not asked of the layout
            loads[(position // interleave + sequence.start_rank) % NUM_RANKS] += 1
    return max(loads) * NUM_RANKS / sum(loads)


@pytest.mark.parametrize(
    ("interleave", "greedy", "fixed"), [(16, 1.003, 1.02), (64, 1.01, 1.1), (128, 1.02, 1.2)]
)
def test_greedy_start_ranks_level_what_rank_zero_would_hold_alone(
    interleave: int, greedy: float, fixed: float
) -> None:
    for seed in range(3):
        assert imbalance(interleave, True, seed) <= greedy
        assert imbalance(interleave, False, seed) > fixed


def test_the_rank_with_least_is_chosen_and_the_lowest_of_equals() -> None:
    specs = [
        GroupSpec(FULL, KVLayout(3, 1, 4)),
        GroupSpec(Visibility("window", 2), KVLayout(1, 1, 4)),
    ]
    assert num_start_ranks(specs) == 3
    live: list[SequenceBlocks] = []
    for length, expected in ((1, 0), (2, 1), (3, 0), (1, 0), (1, 1), (5, 2)):
        assert least_loaded(specs, live) == expected
        live.append(SequenceBlocks(start_rank=expected, num_tokens=length))


def test_a_window_counts_what_is_left_of_it() -> None:
    specs = [GroupSpec(Visibility("window", 2), KVLayout(2, 1, 2))]
    long = SequenceBlocks(start_rank=0, num_tokens=401)  # keys 400 and before went, but for a few
    short = SequenceBlocks(start_rank=1, num_tokens=3)
    assert least_loaded(specs, [long]) == 1
    assert least_loaded(specs, [long, short]) in (0, 1)
    assert least_loaded(specs, [long, short, short]) == 0


def test_where_nothing_is_shared_out_there_is_one_rank() -> None:
    assert num_start_ranks([GroupSpec(FULL, KVLayout(1, 1, 4))]) == 1
    assert num_start_ranks([]) == 1
