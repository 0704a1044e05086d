"""Every rank's tensor visits every other rank once, and the next one travels meanwhile."""

from __future__ import annotations

import pytest
import torch

from heddle.attention.ring import visitors
from heddle.comm.base import Pending
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup, ThreadWorld


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_visitor_comes_once_and_is_what_its_rank_sent(size: int) -> None:
    def body(world: ThreadWorld) -> list[tuple[int, list[float]]]:
        group = world.group("dcp", [range(size)])
        own = torch.full((2,), float(group.rank))
        return [(source, tensor.tolist()) for source, tensor in visitors(group, own)]

    for rank, found in enumerate(ThreadGroup(size).run(body)):
        assert found == [
            ((rank - hop) % size, [float((rank - hop) % size)] * 2) for hop in range(size)
        ]


class Watched(SoloCommunicator):
    """Notes when transfers begin and end; three ranks, all holding the same."""

    world_size = 3  # type: ignore[assignment]

    def __init__(self) -> None:
        self.events: list[str] = []

    def shift(self, tensor: torch.Tensor) -> Pending:
        self.events.append("begin")
        events = self.events

        class Arrival:
            def wait(self) -> torch.Tensor:
                events.append("wait")
                return tensor

        return Arrival()


def test_a_transfer_is_under_way_while_a_visitor_is_met() -> None:
    group = Watched()
    for _ in visitors(group, torch.zeros(1)):
        group.events.append("meet")
    assert group.events == ["begin", "meet", "wait", "begin", "meet", "wait", "meet"]
