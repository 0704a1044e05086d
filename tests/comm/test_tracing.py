from __future__ import annotations

import pytest
import torch

from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import Trace, TracingWorld

# Received by one of 4 ranks for an input of 8 float32 = 32 bytes, by hand.
BYTES = {"all_gather": 96, "reduce_scatter": 24, "all_to_all": 24, "all_reduce": 48}


def test_bytes_and_calls_are_written_down_in_order():
    def body(thread_world):
        world = TracingWorld(thread_world)
        dcp = world.group("dcp", [[0, 1, 2, 3]])
        pcp = world.group("pcp", [[0, 1], [2, 3]])
        world.trace.label = "layer 7"
        results = [getattr(dcp, op)(torch.ones(4, 2)) for op in BYTES]
        world.trace.label = ""
        pcp.all_gather(torch.ones(3, dtype=torch.int64))
        return world.trace, results, (world.global_rank, dcp.rank, pcp.rank, pcp.world_size)

    for rank, (trace, results, places) in enumerate(ThreadGroup(4).run(body)):
        assert places == (rank, rank, rank % 2, 2)
        assert [record.op for record in trace.records] == [*BYTES, "all_gather"]
        assert [record.bytes_received for record in trace.records] == [*BYTES.values(), 24]
        assert [record.sequence for record in trace.records] == [0, 1, 2, 3, 4]
        assert [record.label for record in trace.records] == ["layer 7"] * 4 + [""]
        assert [record.kind for record in trace.records] == ["dcp"] * 4 + ["pcp"]
        assert trace.records[0].shape == (4, 2)
        assert trace.records[4].dtype == torch.int64
        assert trace.bytes_received() == 96 + 24 + 24 + 48 + 24
        assert [tuple(result.shape) for result in results] == [(4, 4, 2), (2,), (4, 2), (4, 2)]
        assert results[3].eq(4).all()
        trace.clear()
        assert trace.records == []


def test_transfers_count_what_comes_here():
    """On 3 ranks: a shift of 4 bfloat16 brings 8 bytes, a receive of [2, 3] float64 brings 48."""

    def body(thread_world):
        world = TracingWorld(thread_world)
        group = world.group("pp", [[0, 1, 2]])
        arriving = group.shift(torch.full((4,), float(group.rank), dtype=torch.bfloat16))
        if group.rank == 0:
            group.send(torch.ones(2, 3, dtype=torch.float64), 1)
        if group.rank == 1:
            assert group.receive((2, 3), torch.float64, 0).eq(1).all()
        assert arriving.wait().eq((group.rank - 1) % 3).all()
        return [(r.op, r.kind, r.shape, r.dtype, r.bytes_received) for r in world.trace.records]

    shift = ("shift", "pp", (4,), torch.bfloat16, 8)
    assert ThreadGroup(3).run(body) == [
        [shift, ("send", "pp", (2, 3), torch.float64, 0)],
        [shift, ("receive", "pp", (2, 3), torch.float64, 48)],
        [shift],
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_bytes_are_those_of_the_dtype(dtype):
    trace = Trace()
    trace.add("all_gather", "tp", (5,), dtype, world_size=3)
    assert trace.bytes_received() == 2 * 5 * dtype.itemsize


def test_groups_of_one_leave_no_trace():
    def body(thread_world):
        world = TracingWorld(thread_world)
        world.group("tp", [[0], [1]]).all_reduce(torch.ones(2))
        return world.trace.records

    assert ThreadGroup(2).run(body) == [[], []]


def test_a_deadline_passes_through():
    def body(thread_world):
        group = TracingWorld(thread_world).group("tp", [[0, 1]])
        group.set_deadline(0.0)
        group.all_reduce(torch.ones(1))

    with pytest.raises(Exception, match="waited until the deadline"):
        ThreadGroup(2).run(body)
