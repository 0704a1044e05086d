from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from heddle.scheduler.batch import ScheduledBatch
from heddle.simulator.group import NEVER, Group
from heddle.simulator.prices import Price, Shape
from heddle.simulator.replica import Step


class Scripted:
    """A replica whose steps take what a list says; None: it has nothing to run then."""

    def __init__(self, *prices: tuple[float, float] | None) -> None:
        self._prices = list(prices)
        self.ended: list[float] = []

    def begin_run(self, now: float) -> None:
        return None

    def choose(self, now: float) -> Step | None:
        price = self._prices.pop(0) if self._prices else None
        if price is None:
            return None
        return Step(ScheduledBatch(parts=()), Shape(1, 0), Price(*price, 1.0), now)

    def finish(self, step: Step, now: float) -> list[int]:
        self.ended.append(now)
        return [len(self.ended)]


def group(*replicas: Any, places: int = 1) -> Group:
    return Group(replicas, places)


def run(found: Group, rounds: int) -> list[float]:
    """Times at which steps end, each begun when the one before has ended."""
    ends = []
    now = 0.0
    for _ in range(rounds):
        found.begin(now)
        now = found.next_end
        if now == NEVER:
            break
        ends.append(now)
        found.end()
    return ends


def test_steps_of_one_stage_follow_each_other() -> None:
    assert run(group(Scripted((2.0, 2.0), (3.0, 3.0))), 3) == [2.0, 5.0]


def test_a_step_leaves_a_pipeline_a_stage_after_the_one_before_it() -> None:
    # Two stages of one second each: the first step takes both, then one ends every second.
    replica = Scripted(*[(2.0, 1.0)] * 4)
    assert run(group(replica, places=2), 4) == [2.0, 3.0, 4.0, 5.0]


def test_in_lockstep_the_slowest_step_is_everybodys() -> None:
    quick, slow = Scripted((1.0, 1.0), (1.0, 1.0)), Scripted((4.0, 4.0), None)
    assert run(group(quick, slow), 3) == [4.0, 5.0]
    assert (quick.ended, slow.ended) == ([4.0, 5.0], [4.0])


def test_nothing_to_run_is_never_done() -> None:
    found = group(Scripted())
    found.begin(0.0)
    assert found.next_end == NEVER
    found.settle(1.0)
    assert found.next_end == NEVER


@pytest.mark.parametrize("places", [1, 3])
def test_no_more_steps_are_under_way_than_there_are_places(places: int) -> None:
    replica = Scripted(*[(3.0, 1.0)] * 9)
    found = group(replica, places=places)
    found.begin(0.0)
    assert len(replica._prices) == 9 - places
    assert np.isfinite(found.next_end)
