"""Lanes merge in their own order, whoever held them."""

from __future__ import annotations

import pytest
import torch

from heddle.attention.exchange.lanes import merge_lanes
from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState, merge
from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup, ThreadWorld
from heddle.comm.tracing import TracingWorld

LANES, ROWS, HEADS, WIDTH = 12, 5, 4, 3


def partials() -> tuple[AttentionState, torch.Tensor]:
    """A state per lane, and who saw keys; the others hold garbage."""
    generator = torch.Generator().manual_seed(3)
    out = torch.randn(LANES, ROWS, HEADS, WIDTH, generator=generator)
    lse = torch.randn(LANES, ROWS, HEADS, generator=generator) * 9
    visible = torch.rand(LANES, ROWS, generator=generator) < 0.7
    visible[:, 2] = False
    out[~visible], lse[~visible] = torch.nan, torch.inf
    return AttentionState(out, lse), visible


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("is_copy", [False, True])
def test_any_number_of_ranks_gives_the_bits_of_one_merge(
    shape: tuple[int, int], is_copy: bool
) -> None:
    """Each rank holds the partials of all rows and heads in its own lanes, and gets its own."""
    replicas, size = shape
    states, visible = partials()
    ranks = replicas * size
    rows = ROWS if is_copy else ROWS * replicas
    out = states.out.repeat(1, rows // ROWS, size, 1)
    lse = states.lse.repeat(1, rows // ROWS, size)
    seen = visible.repeat(1, rows // ROWS)
    expected = merge(states, visible.unsqueeze(-1))

    def rank_body(inner: ThreadWorld) -> AttentionState:
        world = TracingWorld(inner)
        dcp: Communicator = SoloCommunicator()
        if ranks > 1:
            dcp = world.group("dcp", [range(ranks)])
        placement = Placement(
            num_replicas=replicas,
            slice_size=size,
            num_rows=ROWS,
            lanes=HEADS,
            is_copy=is_copy,
            position=dcp.rank,
        )
        held = range(dcp.rank, LANES, ranks)
        found = merge_lanes(
            [AttentionState(out[lane], lse[lane]) for lane in held], seen, placement, dcp
        )
        own = len(held) * ROWS * HEADS * (WIDTH + 1) * 4
        received = [int(record.bytes_received) for record in world.trace.records]
        assert received == ([(ranks - 1) * own] if ranks > 1 else [])
        return found

    for found in ThreadGroup(ranks).run(rank_body):
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.lse, expected.lse)
        assert (found.out[2] == 0).all()
        assert (found.lse[2] == -torch.inf).all()
