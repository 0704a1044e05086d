"""A collective that the plan does not know stops before it is made."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heddle.comm.base import World
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from heddle.errors import PlanMismatch
from heddle.runner.guard import GuardedCommunicator, ScheduleGuard
from heddle.step.schedule import Collective

GATHER = Collective("all_gather", "dcp", (2, 3), "float32")
SUM = Collective("all_reduce", "dcp", (4,), "float64")


def run_calls(body: object) -> list[int]:
    """Run `body(guard, communicator)` on two ranks; the number of calls that reached the wire."""

    def rank_body(inner: World) -> int:
        world = TracingWorld(inner)
        guard = ScheduleGuard()
        group = GuardedCommunicator(world.group("dcp", [[0, 1]]), "dcp", guard)
        guard.begin([GATHER, SUM])
        try:
            body(guard, group)  # type: ignore[operator]
        except PlanMismatch as error:
            return -100 if "schedule" not in str(error) else -len(world.trace.records) - 1
        return len(world.trace.records)

    return ThreadGroup(2).run(rank_body)


def test_the_scheduled_calls_pass() -> None:
    def body(guard: ScheduleGuard, group: GuardedCommunicator) -> None:
        group.all_gather(torch.zeros(2, 3))
        group.all_reduce(torch.zeros(4, dtype=torch.float64))
        guard.finish()

    assert run_calls(body) == [2, 2]


@pytest.mark.parametrize(
    "change",
    [{"shape": (3, 2)}, {"dtype": "int32"}, {"op": "all_to_all"}],
    ids=["shape", "dtype", "operation"],
)
def test_a_call_that_differs_never_reaches_the_wire(change: dict[str, object]) -> None:
    call = dataclasses.asdict(Call(*GATHER)) | change

    def body(guard: ScheduleGuard, group: GuardedCommunicator) -> None:
        tensor = torch.zeros(call["shape"], dtype=getattr(torch, str(call["dtype"])))
        getattr(group, str(call["op"]))(tensor)

    assert run_calls(body) == [-1, -1]


@dataclasses.dataclass
class Call:
    op: str
    group: str
    shape: tuple[int, ...]
    dtype: str


def test_swapped_calls_are_refused() -> None:
    def body(guard: ScheduleGuard, group: GuardedCommunicator) -> None:
        group.all_reduce(torch.zeros(4, dtype=torch.float64))

    assert run_calls(body) == [-1, -1]


def test_a_call_too_many_is_refused() -> None:
    def body(guard: ScheduleGuard, group: GuardedCommunicator) -> None:
        group.all_gather(torch.zeros(2, 3))
        group.all_reduce(torch.zeros(4, dtype=torch.float64))
        group.all_reduce(torch.zeros(4, dtype=torch.float64))

    assert run_calls(body) == [-3, -3]


def test_a_skipped_call_is_reported_at_the_end() -> None:
    def body(guard: ScheduleGuard, group: GuardedCommunicator) -> None:
        group.all_gather(torch.zeros(2, 3))
        guard.finish()

    assert run_calls(body) == [-2, -2]
