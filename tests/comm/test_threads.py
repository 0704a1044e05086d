from __future__ import annotations

import _thread
import threading
import time
import traceback

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.comm.threads import ThreadGroup
from heddle.errors import (
    CollectiveTimeout,
    ConfigError,
    PlanMismatch,
    RankFailed,
    TopologyError,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.bool,
]


def whole(world):
    return world.group("dcp", [range(3)])


@given(
    size=st.integers(1, 5),
    shape=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=30)
def test_moves_keep_every_bit(size, shape, dtype):
    generator = torch.Generator().manual_seed(size)
    sent = torch.randint(0, 2**15, (size, size, *shape), generator=generator).to(dtype)

    def body(world):
        group = world.group("pcp", [range(size)])
        own = sent[group.rank]
        return group.all_gather(own), group.all_to_all(own)

    for rank, (gathered, exchanged) in enumerate(ThreadGroup(size, 20).run(body)):
        assert gathered.dtype == exchanged.dtype == dtype
        assert torch.equal(gathered, sent)
        assert torch.equal(exchanged, sent[:, rank])


@given(size=st.integers(1, 5), dtype=st.sampled_from(DTYPES[:-1]), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_sums_add_in_group_order_on_all_ranks(size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    sent = (torch.randn((size, size, 4), generator=generator) * 100).to(dtype)
    half = dtype in (torch.bfloat16, torch.float16)
    total = torch.zeros(size, 4, dtype=torch.float32 if half else dtype)
    for part in sent:
        total = total + part
    total = total.to(dtype)

    def body(world):
        group = world.group("tp", [range(size)])
        return group.all_reduce(sent[group.rank]), group.reduce_scatter(sent[group.rank])

    for rank, (reduced, scattered) in enumerate(ThreadGroup(size, 20).run(body)):
        assert torch.equal(reduced, total)
        assert torch.equal(scattered, total[rank])


def test_group_order_is_that_of_the_list():
    def body(world):
        group = world.group("dcp", [[2, 0], [1, 3]])
        return group.rank, group.all_gather(torch.tensor(world.global_rank)).tolist()

    assert ThreadGroup(4).run(body) == [(1, [2, 0]), (0, [1, 3]), (0, [2, 0]), (1, [1, 3])]


def test_groups_of_one_move_nothing():
    x = torch.ones(2)

    def body(world):
        return world.group("slice", [[0], [1]]).all_reduce(x)

    assert all(found is x for found in ThreadGroup(2).run(body))


def test_results_are_fresh_and_inputs_unchanged():
    def body(world):
        group = whole(world)
        own = torch.full((3, 2), float(group.rank))
        calls = (group.all_gather, group.all_reduce, group.reduce_scatter, group.all_to_all)
        for call in calls:
            call(own).add_(100.0)
        own.add_(1.0)
        return own

    for rank, own in enumerate(ThreadGroup(3).run(body)):
        assert (own == rank + 1).all()


def test_a_tensor_may_be_reused_while_others_still_read():
    def body(world):
        group = whole(world)
        own, seen = torch.zeros(1000), []
        for step in range(20):
            own.fill_(step)
            if group.rank == 2:
                time.sleep(0.001)
            seen.append(group.all_gather(own))
        return all((got == step).all() for step, got in enumerate(seen))

    assert ThreadGroup(3).run(body) == [True] * 3


def test_the_first_exception_is_raised_with_rank_and_traceback():
    def explode_here():
        raise LookupError("lost")

    def body(world):
        group = whole(world)
        group.all_reduce(torch.ones(1))
        if world.global_rank == 1:
            explode_here()
        group.all_reduce(torch.ones(1))

    started = time.monotonic()
    with pytest.raises(LookupError, match="lost") as raised:
        ThreadGroup(3).run(body)
    assert time.monotonic() - started < 5
    assert raised.value.__notes__ == ["raised on rank 1 of 3"]
    assert "explode_here" in "".join(traceback.format_exception(raised.value))


def test_ranks_that_disagree_are_stopped():
    def body(world):
        whole(world).all_reduce(torch.ones(2 if world.global_rank == 1 else 3))

    with pytest.raises(PlanMismatch, match=r"all_reduce of torch.float32 \[2\]"):
        ThreadGroup(3).run(body)


def test_a_rank_that_returns_early_does_not_hang_the_others():
    def body(world):
        if world.global_rank != 1:
            whole(world).all_reduce(torch.ones(1))

    started = time.monotonic()
    with pytest.raises(PlanMismatch, match=r"ranks \[1\] returned without making it"):
        ThreadGroup(3).run(body)
    assert time.monotonic() - started < 5


def test_a_deadline_holds_for_every_later_call():
    def body(world):
        group = whole(world)
        group.set_deadline(time.monotonic() + 0.6)
        group.all_reduce(torch.ones(1))
        if world.global_rank == 1:
            time.sleep(1.5)
        group.all_reduce(torch.ones(1))

    with pytest.raises(CollectiveTimeout, match=r"waited until the deadline; missing ranks: \[1\]"):
        ThreadGroup(3).run(body)


def test_a_deadline_beyond_the_limit_of_the_group_is_waited_for():
    """A long step has a late deadline; the group's own limit is for calls without one."""

    def body(world):
        group = world.group("tp", [[0, 1]])
        group.set_deadline(time.monotonic() + 30)
        if world.global_rank == 1:
            time.sleep(0.5)
        return int(group.all_reduce(torch.tensor(1)))

    assert ThreadGroup(2, timeout_seconds=0.1).run(body) == [2, 2]


def test_without_a_deadline_the_limit_of_the_group_holds():
    def body(world):
        group = whole(world)
        group.set_deadline(time.monotonic() + 60)
        group.set_deadline(None)
        if world.global_rank == 0:
            time.sleep(1.0)
        group.all_reduce(torch.ones(1))

    with pytest.raises(CollectiveTimeout, match=r"the group limit of 0.1 s; missing ranks: \[0\]"):
        ThreadGroup(3, timeout_seconds=0.1).run(body)


def test_a_failed_run_leaves_the_next_one_alone():
    group = ThreadGroup(2)

    def fail(world):
        raise RuntimeError("once")

    with pytest.raises(RuntimeError, match="once"):
        group.run(fail)
    before = threading.active_count()
    assert group.run(lambda world: world.global_rank) == [0, 1]
    assert threading.active_count() == before


def test_an_owner_of_threads_can_abort_a_waiting_rank():
    group = ThreadGroup(2)
    raised = []

    def wait():
        try:
            group.world(0).group("tp", [[0, 1]]).all_reduce(torch.ones(1))
        except RankFailed as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)  # whether it waits already or comes later, it is told
    group.abort(ValueError("bad step"), rank=1)
    thread.join(5)
    assert raised == ["rank 1 failed first: ValueError: bad step"]
    with pytest.raises(RankFailed, match="bad step"):
        group.world(1).group("tp", [[0, 1]]).all_reduce(torch.ones(1))


def test_an_interrupted_caller_leaves_no_rank_waiting():
    told: list[str] = []
    ended, released = threading.Event(), threading.Event()

    def body(world):
        group = world.group("tp", [[0, 1]])
        if world.global_rank == 1:
            _thread.interrupt_main()
            released.wait(10)
            return
        try:
            group.all_reduce(torch.ones(1))
        except RankFailed as error:
            told.append(str(error))
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        ThreadGroup(2, timeout_seconds=20).run(body)
    ended.wait(5)
    released.set()
    assert told == ["the world was ended: KeyboardInterrupt: "]


def test_misuse_is_refused():
    with pytest.raises(ConfigError, match="world_size=0 is not legal"):
        ThreadGroup(0)
    with pytest.raises(TopologyError, match="exactly once"):
        ThreadGroup(2).run(lambda world: world.group("tp", [[0]]))
    for op in ("reduce_scatter", "all_to_all"):
        with pytest.raises(ValueError, match="the group size 3"):
            ThreadGroup(3).run(lambda world, op=op: getattr(whole(world), op)(torch.ones(2)))
