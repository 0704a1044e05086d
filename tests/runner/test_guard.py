"""A collective that the plan does not know stops before it is made."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from heddle.comm.base import Communicator, RankGroups, World
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from heddle.errors import PlanMismatch
from heddle.faults.watch import RankWatch
from heddle.layout.mesh import GROUP_KINDS
from heddle.runner.guard import GuardedCommunicator, ScheduleGuard, guard_groups
from heddle.step.traffic import Collective

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


def test_transfers_are_held_against_the_schedule() -> None:
    """A shift when it begins, a receive as announced."""
    shift = Collective("shift", "dcp", (2,), "float32")
    hand = [Collective(op, "dcp", (3,), "int64") for op in ("send", "receive")]

    def body(inner: World) -> None:
        guard = ScheduleGuard()
        group = GuardedCommunicator(inner.group("dcp", [[0, 1]]), "dcp", guard)
        guard.begin([shift, hand[group.rank]])
        arriving = group.shift(torch.full((2,), float(group.rank)))
        if group.rank == 0:
            group.send(torch.arange(3), 1)
        else:
            assert group.receive((3,), torch.int64, 0).tolist() == [0, 1, 2]
        assert arriving.wait().eq(1 - group.rank).all()
        guard.finish()
        assert (group.rank, group.world_size) == (inner.global_rank, 2)

    ThreadGroup(2).run(body)


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.shift(torch.zeros(3)),
        lambda group: group.send(torch.zeros(2, 3), 1 - group.rank),
        lambda group: group.receive((2, 3), torch.float32, 1 - group.rank),
    ],
    ids=["shift", "send", "receive"],
)
def test_a_transfer_that_is_not_due_never_reaches_the_wire(call: object) -> None:
    assert run_calls(lambda guard, group: call(group)) == [-1, -1]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("shape", "is_due"), [((2, 5, 4), True), ((2, 0, 4), True), ((2, 5, 3), False), ((2, 5), False)]
)
def test_none_in_a_schedule_is_any_size_of_that_axis(shape: tuple[int, ...], is_due: bool) -> None:
    guard = ScheduleGuard()
    due = Collective("all_to_all", "ep", (2, None, 4), "float32")
    guard.begin([due, due])
    guard.check("all_to_all", "ep", (2, 7, 4), torch.float32)
    if is_due:
        guard.check("all_to_all", "ep", shape, torch.float32)
        guard.finish()
        return
    with pytest.raises(PlanMismatch, match=r"collective 1 of the step is .*None"):
        guard.check("all_to_all", "ep", shape, torch.float32)


def test_an_open_size_leaves_operation_group_and_dtype_fixed() -> None:
    for op, group, dtype in (
        ("all_gather", "ep", torch.float32),
        ("all_to_all", "tp", torch.float32),
        ("all_to_all", "ep", torch.float16),
    ):
        guard = ScheduleGuard()
        guard.begin([Collective("all_to_all", "ep", (None,), "float32")])
        with pytest.raises(PlanMismatch, match="the plan's schedule says"):
            guard.check(op, group, (1,), dtype)  # type: ignore[arg-type]


def test_every_group_of_more_than_one_is_guarded() -> None:
    def body(world: World) -> None:
        pair, solo = world.group("tp", [[0, 1]]), SoloCommunicator()
        for kind in GROUP_KINDS:
            alone: dict[str, Communicator] = dict.fromkeys(GROUP_KINDS, solo)
            groups = guard_groups(RankGroups(**alone | {kind: pair}), ScheduleGuard())
            guarded = [k for k in GROUP_KINDS if isinstance(groups.of(k), GuardedCommunicator)]
            assert guarded == [kind]

    ThreadGroup(2).run(body)


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


def hashes_of(calls: list[Collective], schedule: list[Collective] | None = None) -> dict[str, int]:
    guard = ScheduleGuard()
    guard.begin(schedule or calls)
    for call in calls:
        guard.check(call.op, call.group, call.shape, getattr(torch, call.dtype))  # type: ignore[arg-type]
    guard.finish()
    return dict(guard.call_hashes)


def test_a_hash_tells_order_and_sizes_of_a_group_s_calls_and_of_no_other() -> None:
    first = Collective("all_gather", "dcp", (2, 3), "float32")
    second = Collective("all_reduce", "dcp", (4,), "float32")
    other = Collective("all_reduce", "tp", (4,), "float32")
    usual = hashes_of([first, second, other])
    assert hashes_of([other, first, second]) == usual
    assert hashes_of([second, first, other])["dcp"] != usual["dcp"]
    assert hashes_of([first._replace(dtype="int32"), second, other])["dcp"] != usual["dcp"]
    assert hashes_of([first, second, other, other])["tp"] != usual["tp"]
    assert hashes_of([first, second]) == {"dcp": usual["dcp"]}
    assert usual["dcp"] == 0xBE8333E645FE9745  # the same in every process and on every host


def test_a_size_that_the_plan_leaves_open_counts_as_it_was() -> None:
    scheduled = [Collective("all_to_all", "ep", (None, 4), "float32")]
    found = [
        hashes_of([Collective("all_to_all", "ep", (n, 4), "float32")], scheduled) for n in (2, 3)
    ]
    assert found[0] != found[1]


def test_more_calls_that_differ_than_are_kept_are_told_as_they_are() -> None:
    watch = RankWatch()
    guard = ScheduleGuard(watch)
    last = 0
    for _ in range(2):
        for size in range(3, 5003):
            call = Collective("all_reduce", "tp", (size, 2), "int64")
            guard.begin([call])
            guard.check("all_reduce", "tp", torch.Size((size, 2)), torch.int64)
            guard.note_return()
            last = guard.call_hashes["tp"]
    standing = watch.page.standing()
    assert standing is not None
    assert [found.shape for found in standing.calls[-2:]] == [(5001, 2), (5002, 2)]
    assert (standing.calls[-1].op, standing.calls[-1].dtype) == ("all_reduce", "int64")
    assert last == hashes_of([Collective("all_reduce", "tp", (5002, 2), "int64")])["tp"]


def test_a_checked_call_costs_little() -> None:
    """Microseconds, printed; the ceiling is ten times what is wanted."""
    guard, out = ScheduleGuard(), torch.zeros(4)

    class Nothing(SoloCommunicator):
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            del tensor
            return out

    group, count = GuardedCommunicator(Nothing(), "tp", guard), 5000
    guard.begin([Collective("all_reduce", "tp", (4,), "float32")] * count)
    began = time.thread_time()
    for _ in range(count):
        group.all_reduce(out)
    each = (time.thread_time() - began) / count
    guard.finish()
    print(f"a collective that is checked and noted: {each * 1e6:.2f} us")
    assert each < 50e-6
