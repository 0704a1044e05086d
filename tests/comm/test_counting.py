"""Totals are those of a trace of the same calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from heddle.comm import counting
from heddle.comm.base import RankGroups
from heddle.comm.counting import CollectiveCounts, CountingCommunicator, count_groups
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup, ThreadWorld
from heddle.comm.tracing import Trace, TracingWorld
from heddle.step.batch import CollectiveTotal


def sums(totals: tuple[CollectiveTotal, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(total.op, total.group): (total.num_calls, total.num_bytes) for total in totals}


def sums_of(trace: Trace) -> dict[tuple[str, str], tuple[int, int]]:
    calls: Counter[tuple[str, str]] = Counter()
    received: Counter[tuple[str, str]] = Counter()
    for record in trace.records:
        calls[record.op, record.kind] += 1
        received[record.op, record.kind] += record.bytes_received
    return {kind: (calls[kind], received[kind]) for kind in calls}


def call_all(group: Any, dtype: torch.dtype) -> None:
    """Every call of the protocol, of several sizes; some do not divide by the ranks."""
    for width in (1, 5, 7):
        own = torch.ones(width, dtype=dtype)
        blocks = torch.ones(group.world_size, width, dtype=dtype)
        assert group.all_gather(own).shape == (group.world_size, width)
        assert group.all_reduce(own).eq(group.world_size).all()
        assert group.reduce_scatter(blocks).eq(group.world_size).all()
        assert group.all_to_all(blocks).eq(1).all()
        assert group.shift(own).wait().eq(1).all()
    if group.rank == 0:
        group.send(torch.ones(2, 3, dtype=dtype), 1)
    if group.rank == 1:
        assert group.receive((2, 3), dtype, 0).eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_totals_are_those_of_a_trace(size: int, dtype: torch.dtype) -> None:
    def body(world: ThreadWorld) -> int:
        traced, counts = TracingWorld(world), CollectiveCounts()
        inner = traced.group("pcp", [range(size)])
        group = CountingCommunicator(inner, "pcp", counts)
        assert (group.rank, group.world_size) == (inner.rank, inner.world_size)
        call_all(group, dtype)
        totals = counts.take()
        assert sums(totals) == sums_of(traced.trace)
        assert all(total.seconds > 0 for total in totals)
        return len(totals)

    counts = ThreadGroup(size).run(body)
    assert counts == [6, 6, 5, 5][:size]  # five by all, and one end of a transfer


def test_what_was_taken_is_not_taken_again() -> None:
    counts = CollectiveCounts()
    group = CountingCommunicator(SoloCommunicator(), "tp", counts)
    group.all_gather(torch.ones(2))
    group.all_gather(torch.ones(2))
    (total,) = counts.take()
    assert (total.op, total.group, total.num_calls) == ("all_gather", "tp", 2)
    assert counts.take() == ()
    group.all_reduce(torch.ones(2))
    (total,) = counts.take()
    assert (total.op, total.num_calls) == ("all_reduce", 1)


def test_seconds_are_those_of_calls_and_of_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second after the one before."""
    ticks = iter(range(100))
    monkeypatch.setattr(counting, "monotonic", lambda: float(next(ticks)))
    counts = CollectiveCounts()
    group = CountingCommunicator(SoloCommunicator(), "dcp", counts)
    for _ in range(3):
        group.all_to_all(torch.ones(1, 2))
    pending = group.shift(torch.ones(2))
    assert counts.take() == (
        CollectiveTotal("all_to_all", "dcp", 3, 0, 3.0),
        CollectiveTotal("shift", "dcp", 1, 8, 1.0),
    )
    pending = group.shift(torch.ones(2))
    pending.wait()
    assert counts.take() == (CollectiveTotal("shift", "dcp", 1, 8, 2.0),)


def test_groups_of_one_stay_as_they_are() -> None:
    def body(world: ThreadWorld) -> list[str]:
        solo = SoloCommunicator()
        groups = RankGroups(
            tp=world.group("tp", [[0, 1]]), pcp=solo, dcp=solo, slice=solo, pp=solo, ep=solo
        )
        counts = CollectiveCounts()
        counted = count_groups(groups, counts)
        assert counted.pcp is counted.ep is solo
        counted.tp.all_reduce(torch.ones(3))
        return [total.group for total in counts.take()]

    assert ThreadGroup(2).run(body) == [["tp"], ["tp"]]


def test_a_deadline_passes_through() -> None:
    def body(world: ThreadWorld) -> None:
        group = CountingCommunicator(world.group("tp", [[0, 1]]), "tp", CollectiveCounts())
        group.set_deadline(0.0)
        group.all_reduce(torch.ones(1))

    with pytest.raises(Exception, match="waited until the deadline"):
        ThreadGroup(2).run(body)
