from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.kvcache.chain import BlockChain, block_tokens
from heddle.kvcache.keys import chain_key


def test_keys_are_learnt_once_and_in_order():
    chain = BlockChain(root=b"root")
    assert chain.parent_key(0) == b"root"
    chain.learn_key(0, (1, 2))
    chain.learn_key(0, (1, 2))
    chain.learn_key(1, (3, 4))
    first = chain_key(b"root", (1, 2))
    assert chain.keys == [first, chain_key(first, (3, 4))]
    assert chain.parent_key(2) == chain.keys[1]


@given(st.integers(0, 20), st.integers(1, 6))
def test_pieces_tile_the_tokens(count, size):
    tokens = list(range(count))
    pieces = [block_tokens(tokens, index, size, count) for index in range(-(-count // size))]
    assert [token for piece in pieces for token in piece] == tokens
    assert all(len(piece) == size for piece in pieces[:-1])
