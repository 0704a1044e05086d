from __future__ import annotations

import pytest
import torch

from heddle.attention.exchange.local import LocalExchange
from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup

STATE = AttentionState(torch.randn(3, 2, 4), torch.randn(3, 2))


def placement(replicas):
    return Placement(
        num_replicas=replicas, slice_size=1, num_rows=3, lanes=2, is_copy=False, position=0
    )


def test_a_group_of_one_keeps_its_state():
    visible = torch.ones(1, 3, dtype=torch.bool)
    assert LocalExchange().merge(STATE, visible, placement(1), SoloCommunicator()) is STATE


def test_a_larger_group_is_refused():
    def body(world):
        dcp = world.group("dcp", [[0, 1]])
        LocalExchange().merge(STATE, torch.ones(2, 6, dtype=torch.bool), placement(2), dcp)

    with pytest.raises(ValueError, match="in a group of 2; it merges nothing"):
        ThreadGroup(2).run(body)
