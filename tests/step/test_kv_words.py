"""A word tells rows apart exactly where their keys and values may differ."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from heddle.kvcache.keys import CacheScope
from heddle.step.kv_words import kv_words

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(TOKENS, TOKENS)
def test_words_are_equal_as_far_as_tokens_are(first: list[int], second: list[int]) -> None:
    common = next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) == 2),
        min(len(first), len(second)),
    )
    count = min(len(first), len(second))
    same = kv_words(first, CacheScope())[:count] == kv_words(second, CacheScope())[:count]
    assert same.tolist() == [i < common for i in range(count)]


@given(TOKENS)
def test_no_two_positions_of_a_sequence_share_a_word(tokens: list[int]) -> None:
    assert len(np.unique(kv_words(tokens, CacheScope()))) == len(tokens)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_the_order_of_tokens_counts(tokens: list[int]) -> None:
    turned = tokens[::-1]
    assume(turned != tokens)
    assert kv_words(tokens, CacheScope())[-1] != kv_words(turned, CacheScope())[-1]


def test_each_part_of_a_scope_counts() -> None:
    scopes = [
        CacheScope(),
        CacheScope(salt="a"),
        CacheScope(adapter="a"),
        CacheScope(rope_variant=1),
        CacheScope(embeddings=b"a"),
    ]
    assert len({int(kv_words([7], scope)[0]) for scope in scopes}) == len(scopes)
