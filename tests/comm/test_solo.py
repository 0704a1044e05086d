from __future__ import annotations

import pytest
import torch

from heddle.comm.solo import SoloCommunicator, SoloWorld
from heddle.errors import TopologyError

X = torch.tensor([[1.0, 2.0]])


def test_every_collective_is_the_identity():
    group = SoloCommunicator()
    group.set_deadline(0.0)
    assert (group.rank, group.world_size) == (0, 1)
    assert torch.equal(group.all_gather(X), X[None])
    assert torch.equal(group.reduce_scatter(X), X[0])
    assert torch.equal(group.all_reduce(X), X)
    assert torch.equal(group.all_to_all(X), X)
    assert torch.equal(group.shift(X).wait(), X)


def test_blocks_are_still_one_per_rank():
    for call in (SoloCommunicator().reduce_scatter, SoloCommunicator().all_to_all):
        with pytest.raises(ValueError, match="the group size 1"):
            call(torch.zeros(2))


def test_a_group_of_one_has_no_peer():
    for call in (
        lambda: SoloCommunicator().send(X, 0),
        lambda: SoloCommunicator().receive((1, 2), X.dtype, 1),
    ):
        with pytest.raises(ValueError, match="another rank of the group: this one has none"):
            call()


def test_a_world_of_one_has_no_other_ranks():
    assert SoloWorld().global_rank == 0
    assert SoloWorld().group("tp", [[0]]).world_size == 1
    with pytest.raises(TopologyError, match=r"0\.\.0"):
        SoloWorld().group("tp", [[0, 1]])
