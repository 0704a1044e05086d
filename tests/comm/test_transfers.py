from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.comm.transfers import Transfer, require_peer, ring_neighbours


@given(st.integers(1, 9))
def test_a_ring_visits_every_place_once(size):
    walk = [0]
    for _ in range(size):
        walk.append(ring_neighbours(walk[-1], size)[1])
    assert sorted(walk[:-1]) == list(range(size))
    assert walk[-1] == 0
    assert all(ring_neighbours(b, size)[0] == a for a, b in pairwise(walk))


@pytest.mark.parametrize("peer", [-1, 1, 3])
def test_a_peer_is_another_member(peer):
    require_peer("send", 0, 1, 3)
    require_peer("send", 2, 1, 3)
    match = rf"send on rank 1 names rank {peer}; it must be another rank of the group: \[0, 2\]"
    with pytest.raises(ValueError, match=match):
        require_peer("send", peer, 1, 3)


def test_a_transfer_ends_once_and_holds_nothing_afterwards():
    taken = []
    transfer = Transfer(lambda: taken.append(1) or torch.ones(1))
    assert taken == []
    assert transfer.wait().item() == 1
    with pytest.raises(AssertionError, match="exactly once"):
        transfer.wait()
    assert taken == [1]
