from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.kvcache.keys import CacheIdentity, CacheScope, chain_key, root_key
from heddle.layout.kv import KVLayout

LAYOUT = KVLayout(world_size=2, interleave_size=2, block_size=4)


def identity(layout=LAYOUT, slices=1, model="m", dtype="float32"):
    return CacheIdentity(
        model=model, kv_cache_dtype=dtype, layout_fingerprint=layout.fingerprint(slices, dtype)
    )


@pytest.mark.parametrize(
    "other",
    [
        identity(replace(LAYOUT, world_size=4)),
        identity(replace(LAYOUT, interleave_size=1)),
        identity(replace(LAYOUT, block_size=8)),
        identity(replace(LAYOUT, start_rank=1)),
        identity(slices=2),
        identity(model="n"),
        identity(dtype="bfloat16"),
        replace(identity(), place="group 1"),
    ],
)
def test_roots_differ_when_any_field_differs(other):
    assert root_key(other) != root_key(identity())


def test_salts_separate_and_no_salt_is_the_common_cache():
    keys = {root_key(identity(), CacheScope(salt=salt)) for salt in (None, "", "a", "b")}
    assert len(keys) == 3
    assert root_key(identity(), CacheScope(salt="")) == root_key(identity())


def test_field_borders_are_part_of_the_root():
    left = CacheIdentity(model="ab", kv_cache_dtype="c", layout_fingerprint=0)
    right = CacheIdentity(model="a", kv_cache_dtype="bc", layout_fingerprint=0)
    assert root_key(left) != root_key(right)


def test_chain_key_is_sha256_over_canonical_bytes():
    canonical = b"p" * 32 + (258).to_bytes(8, "little") + (7).to_bytes(8, "little")
    assert chain_key(b"p" * 32, (258, 7)) == hashlib.sha256(canonical).digest()


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_equal_keys_mean_equal_tokens(left, right):
    assert (chain_key(b"r", left) == chain_key(b"r", right)) == (left == right)


def test_a_chain_key_depends_on_what_comes_before():
    first = chain_key(chain_key(b"r", (1, 2)), (3, 4))
    assert first != chain_key(chain_key(b"r", (1, 9)), (3, 4))


def test_scopes_separate_by_every_part():
    parts = ({"salt": "x"}, {"adapter": "x"}, {"rope_variant": 7}, {"embeddings": b"x"})
    scopes = [CacheScope(), *(CacheScope(**part) for part in parts)]
    assert len({root_key(identity(), scope) for scope in scopes}) == len(scopes)
    assert root_key(identity(), CacheScope(rope_variant=2**33)) != root_key(identity())
