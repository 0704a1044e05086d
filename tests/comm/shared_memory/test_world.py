"""A world of one rank, in this process; worlds of several are held by `test_communicator.py`."""

from __future__ import annotations

import os

import pytest
import torch

from heddle.comm.shared_memory.segment import create_segment
from heddle.comm.shared_memory.world import create_shared_world
from heddle.errors import HeddleError, RankFailed, TopologyError
from tests.support.processes import nothing_left, num_descriptors


def test_a_world_of_one_moves_nothing_and_gives_its_descriptors_back() -> None:
    with nothing_left():
        before = num_descriptors()
        world = create_shared_world(rank=0, world_size=1, descriptor=create_segment(1))
        assert num_descriptors() > before
        assert world.global_rank == 0
        group = world.group("tp", [[0]])
        x = torch.ones(3)
        assert group.world_size == 1
        assert group.all_reduce(x) is x
        with pytest.raises(TopologyError, match="exactly once"):
            world.group("dcp", [[0], [1]])
        world.destroy()
        world.destroy()
        del world  # the mapping goes with the last tensor that views it


def test_ranks_that_do_not_come_are_named_within_the_limit() -> None:
    descriptor = create_segment(2)
    with pytest.raises(RankFailed, match=r"2 ranks did not form a group .* missing ranks: \[1\]"):
        create_shared_world(rank=0, world_size=2, descriptor=descriptor, timeout_seconds=0.1)
    with pytest.raises(HeddleError, match="one for 3 ranks of this version"):
        create_shared_world(rank=0, world_size=3, descriptor=descriptor)
    os.close(descriptor)
