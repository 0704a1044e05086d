"""The clock of a rank: parts and calls in order, with the bytes that are received."""

from __future__ import annotations

import torch

from heddle.comm.base import RankGroups, World
from heddle.comm.counting import CollectiveCounts, count_groups
from heddle.comm.rank_clock import RankClock
from heddle.comm.threads import ThreadGroup
from heddle.layout.mesh import GROUP_KINDS
from heddle.step.timeline import StepTimeline


def test_a_step_has_its_parts_and_calls_in_order() -> None:
    def body(world: World) -> StepTimeline:
        groups = RankGroups(**{kind: world.group(kind, [[0, 1]]) for kind in GROUP_KINDS})
        clock = RankClock()
        counted = count_groups(groups, CollectiveCounts(clock))
        clock.begin_step()
        counted.tp.all_reduce(torch.ones(3))  # of a step that ends with an error
        clock.begin_step()
        clock.enter("attention", 4)
        counted.dcp.all_gather(torch.ones(5, 2))
        pending = counted.dcp.shift(torch.ones(6))
        pending.wait()
        clock.enter("output", 4)
        return clock.end_step()

    for timeline in ThreadGroup(2).run(body):
        assert [(p.part, p.layer) for p in timeline.parts] == [
            ("plan", -1),
            ("attention", 4),
            ("output", 4),
        ]
        # One other rank's 10 numbers of 4 bytes; one shift of 6; its wait has no bytes of its own.
        assert [(c.op, c.group, c.num_bytes) for c in timeline.calls] == [
            ("all_gather", "dcp", 40),
            ("shift", "dcp", 24),
            ("wait", "dcp", 0),
        ]
        times = [timeline.parts[1].began]
        times += [time for call in timeline.calls for time in (call.began, call.ended)]
        times += [timeline.parts[2].began, timeline.ended]
        assert times == sorted(times)
