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
from tests.support.processes import LONG_SECONDS, nothing_left

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

    for rank, (gathered, exchanged) in enumerate(ThreadGroup(size).run(body)):
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

    for rank, (reduced, scattered) in enumerate(ThreadGroup(size).run(body)):
        assert torch.equal(reduced, total)
        assert torch.equal(scattered, total[rank])


@given(
    size=st.integers(2, 5),
    shape=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(DTYPES),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=30)
def test_a_ring_of_shifts_brings_every_shard_to_every_rank(size, shape, dtype, order):
    generator = torch.Generator().manual_seed(size)
    shards = torch.randint(0, 2**15, (size, *shape), generator=generator).to(dtype)
    ranks = list(range(size))
    order.shuffle(ranks)

    def body(world):
        group = world.group("dcp", [ranks])
        held = [shards[group.rank]]
        for _ in range(size - 1):
            held.append(group.shift(held[-1]).wait())
        return group.rank, held

    for place, held in ThreadGroup(size).run(body):
        for step, shard in enumerate(held):
            assert shard.dtype == dtype
            assert torch.equal(shard, shards[(place - step) % size])


def test_work_goes_on_while_a_shift_is_under_way():
    """Rank 1 comes late; rank 0 has entered two shifts and summed with others in the meantime."""
    came, worked = threading.Event(), threading.Event()

    def body(world):
        group, other = whole(world), world.group("tp", [[0, 2], [1]])
        if group.rank == 1:
            assert worked.wait(LONG_SECONDS)
            came.set()
        own = torch.tensor([group.rank])
        first, second = group.shift(own), group.shift(own + 10)
        own += 100  # a copy is under way
        total = other.all_reduce(torch.tensor(1))
        if group.rank == 0:
            assert not came.is_set()
            worked.set()
        return int(second.wait()), int(first.wait()), int(total)

    assert ThreadGroup(3).run(body) == [(12, 2, 2), (10, 0, 1), (11, 1, 2)]


@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=20)
def test_a_pipeline_hands_every_tensor_on_in_order(shapes, dtype):
    generator = torch.Generator().manual_seed(len(shapes))
    sent = [torch.randint(0, 2**15, shape, generator=generator).to(dtype) for shape in shapes]

    def body(world):
        group = world.group("pp", [[2, 0, 1]])
        held = []
        for tensor in sent:
            here = tensor
            if group.rank > 0:
                here = group.receive(tensor.shape, dtype, group.rank - 1)
            held.append(here)
            if group.rank < 2:
                group.send(here, group.rank + 1)
        return held

    for held in ThreadGroup(3).run(body):
        for found, tensor in zip(held, sent, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, tensor)


def test_what_was_sent_may_be_overwritten_and_what_came_is_fresh():
    def body(world):
        group = world.group("pp", [[0, 1]])
        own = torch.zeros(3)
        if group.rank == 0:
            for step in range(20):
                group.send(own.fill_(step), 1)
            return own
        return [group.receive((3,), torch.float32, 0).clone() for _ in range(20)]

    _, came = ThreadGroup(2).run(body)
    assert [int(tensor[0]) for tensor in came] == list(range(20))
    assert all(tensor.eq(tensor[0]).all() for tensor in came)


@pytest.mark.parametrize("announced", [((3, 1), torch.float32), ((3,), torch.int32)])
def test_a_receiver_that_expects_another_tensor_stops_both(announced):
    told = []

    def body(world):
        group = whole(world)
        try:
            if group.rank == 0:
                group.send(torch.ones(3), 2)
            if group.rank == 2:
                group.receive(*announced, 0)
        except PlanMismatch as error:
            told.append(str(error))
            raise

    with pytest.raises(PlanMismatch, match="dcp from 0 to 2 call 0"):
        ThreadGroup(3).run(body)
    assert len(told) == 2
    for text in told:
        assert "transfer of torch.float32 [3]" in text
        assert f"transfer of {announced[1]} {list(announced[0])}" in text


def test_shifts_of_other_shapes_and_other_calls_are_stopped():
    def other_shape(world):
        whole(world).shift(torch.ones(2 if world.global_rank == 1 else 3)).wait()

    def other_call(world):
        group = whole(world)
        call = group.all_gather if world.global_rank == 1 else lambda x: group.shift(x).wait()
        call(torch.ones(2))

    with pytest.raises(PlanMismatch, match=r"shift of torch.float32 \[2\]"):
        ThreadGroup(3).run(other_shape)
    with pytest.raises(PlanMismatch, match=r"all_gather of torch.float32 \[2\]"):
        ThreadGroup(3).run(other_call)


def begin_shift_then_wait(group):
    if group.rank == 0:
        group.shift(torch.ones(1)).wait()


def send_to_one(group):
    if group.rank == 0:
        group.send(torch.ones(1), 1)


def receive_from_one(group):
    if group.rank == 0:
        group.receive((1,), torch.float32, 1)


TRANSFERS = [begin_shift_then_wait, send_to_one, receive_from_one]


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_transfer_ends_at_its_deadline(transfer):
    over = threading.Event()

    def body(world):
        group = world.group("pp", [[0, 1]])
        if group.rank == 1:
            over.wait(LONG_SECONDS)
            return
        group.set_deadline(time.monotonic() + 0.3)
        try:
            transfer(group)
        finally:
            over.set()

    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"waited until the deadline; missing ranks: \[1\]"):
        ThreadGroup(2).run(body)
    assert time.monotonic() - started >= 0.3


def test_a_shift_keeps_the_deadline_of_its_beginning():
    over = threading.Event()

    def body(world):
        group = world.group("pp", [[0, 1]])
        if group.rank == 1:
            over.wait(LONG_SECONDS)
            return
        group.set_deadline(time.monotonic() + 0.2)
        arriving = group.shift(torch.ones(1))
        group.set_deadline(None)
        try:
            arriving.wait()
        finally:
            over.set()

    with pytest.raises(CollectiveTimeout, match="waited until the deadline"):
        ThreadGroup(2).run(body)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_peer_that_raised_or_left_ends_a_transfer_at_once(transfer):
    def raising(world):
        group = world.group("pp", [[0, 1]])
        transfer(group)
        if group.rank == 1:
            raise LookupError("lost")

    def leaving(world):
        transfer(world.group("pp", [[0, 1]]))

    started = time.monotonic()
    with pytest.raises(LookupError, match="lost"):
        ThreadGroup(2, LONG_SECONDS).run(raising)
    with pytest.raises(PlanMismatch, match=r"ranks \[1\] returned without making it"):
        ThreadGroup(2, LONG_SECONDS).run(leaving)
    assert time.monotonic() - started < LONG_SECONDS / 2


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
        ThreadGroup(3, LONG_SECONDS).run(body)
    assert time.monotonic() - started < LONG_SECONDS / 2
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
        ThreadGroup(3, LONG_SECONDS).run(body)
    assert time.monotonic() - started < LONG_SECONDS / 2


def test_a_deadline_holds_for_every_later_call():
    over, ready = threading.Event(), threading.Barrier(2, timeout=LONG_SECONDS)

    def body(world):
        group = world.group("dcp", [[0, 1]])
        ready.wait()
        group.set_deadline(time.monotonic() + 1.5)
        group.all_reduce(torch.ones(1))
        if world.global_rank == 1:
            over.wait(LONG_SECONDS)
            return
        try:
            group.all_reduce(torch.ones(1))
        finally:
            over.set()

    with pytest.raises(CollectiveTimeout, match=r"waited until the deadline; missing ranks: \[1\]"):
        ThreadGroup(2).run(body)


def test_a_deadline_beyond_the_limit_of_the_group_is_waited_for():
    """A long step has a late deadline; the group's own limit is for calls without one."""

    def body(world):
        group = world.group("tp", [[0, 1]])
        group.set_deadline(time.monotonic() + LONG_SECONDS)
        if world.global_rank == 1:
            time.sleep(0.5)
        return int(group.all_reduce(torch.tensor(1)))

    assert ThreadGroup(2, timeout_seconds=0.1).run(body) == [2, 2]


def test_without_a_deadline_the_limit_of_the_group_holds():
    over = threading.Event()

    def body(world):
        group = world.group("tp", [[0, 1]])
        group.set_deadline(time.monotonic() + LONG_SECONDS)
        group.set_deadline(None)
        if world.global_rank == 0:
            over.wait(LONG_SECONDS)
            return
        try:
            group.all_reduce(torch.ones(1))
        finally:
            over.set()

    with pytest.raises(CollectiveTimeout, match=r"the group limit of 0.1 s; missing ranks: \[0\]"):
        ThreadGroup(2, timeout_seconds=0.1).run(body)


def test_a_failed_run_leaves_the_next_one_alone():
    group = ThreadGroup(2)

    def fail(world):
        raise RuntimeError("once")

    with pytest.raises(RuntimeError, match="once"):
        group.run(fail)
    with nothing_left():
        assert group.run(lambda world: world.global_rank) == [0, 1]


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
    thread.join(LONG_SECONDS)
    assert raised == ["rank 1 failed first: ValueError: bad step"]
    with pytest.raises(RankFailed, match="bad step"):
        group.world(1).group("tp", [[0, 1]]).all_reduce(torch.ones(1))


def test_an_interrupted_caller_leaves_no_rank_waiting():
    told: list[str] = []
    formed, ended, released = (threading.Event() for _ in range(3))

    def body(world):
        group = world.group("tp", [[0, 1]])
        if world.global_rank == 1:
            formed.wait(LONG_SECONDS)  # else the other rank may still be about to form its group
            _thread.interrupt_main()
            released.wait(LONG_SECONDS)
            return
        formed.set()
        try:
            group.all_reduce(torch.ones(1))
        except RankFailed as error:
            told.append(str(error))
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        ThreadGroup(2, LONG_SECONDS).run(body)
    ended.wait(LONG_SECONDS)
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
    with pytest.raises(ValueError, match="it must be another rank of the group"):
        ThreadGroup(2).run(lambda w: w.group("pp", [[0, 1]]).send(torch.ones(1), w.global_rank))
    with pytest.raises(ValueError, match=r"receive on rank [01] names rank 2"):
        ThreadGroup(2).run(lambda w: w.group("pp", [[0, 1]]).receive((1,), torch.int32, 2))
