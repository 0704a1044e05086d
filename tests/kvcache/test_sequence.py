from __future__ import annotations

from heddle.kvcache.chain import BlockChain
from heddle.kvcache.sequence import SequenceBlocks, SequenceStates


def test_the_chains_are_those_of_the_start_rank():
    blocks = SequenceBlocks(candidates={0: [], 2: [BlockChain(b"", [4, 0, 5])]}, start_rank=2)
    assert blocks.block_tables == ([4, 0, 5],)
    assert blocks.state_use(1) is None


def test_states_go_round():
    states = SequenceStates(BlockChain(b""), slots=[5, 6, 7])
    assert states.use(2) == (0, (5, 6))
    states.advance(1)
    assert states.use(3) == (6, (6, 7, 5))
    states.advance(0)
    assert states.use(1) == (6, (6,))
    states.advance(2)
    assert states.use(3) == (5, (5, 6, 7))
