"""Process ranks over gloo: the same bits as thread ranks, and every loss of a peer in words.

Laws of process ranks of any kind are held by shared memory too, here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial

import pytest
import torch

from heddle.comm.threads import ThreadGroup
from heddle.comm.torch_group import create_torch_world
from heddle.errors import RankFailed, TopologyError
from tests.support.process_ranks import (
    FEW,
    LIBRARIES,
    LIMIT_SECONDS,
    MANY,
    all_calls,
    all_transfers,
    run_processes,
)
from tests.support.processes import await_file

pytestmark = pytest.mark.dist
of_any_kind = pytest.mark.parametrize("library", LIBRARIES)


@of_any_kind
def test_moves_and_scattered_sums_equal_thread_ranks_bit_for_bit(tmp_path, library):
    threads = ThreadGroup(3).run(all_calls)
    processes = run_processes(all_calls, 3, tmp_path, library)
    assert len(threads[0][0]) == 3 * (len(MANY) + 2 * len(FEW))
    for thread, process in zip(threads, processes, strict=True):
        assert process[:2] == thread[:2]
        assert process[3] == thread[3]
    if library == "shm":
        assert [process[2] for process in processes] == [thread[2] for thread in threads]
        return
    # All-reduce: gloo chooses its own order of adding, but ranks agree, and integers are exact.
    shared = len(FEW) + len(MANY)  # the calls of all three ranks together
    assert processes[0][2][:shared] == processes[1][2][:shared] == processes[2][2][:shared]
    for mine, theirs in zip(processes[0][2], threads[0][2], strict=True):
        assert mine[:2] == theirs[:2]
        dtype = getattr(torch, mine[0].removeprefix("torch."))
        if mine[2] and dtype.is_floating_point:
            left, right = (torch.frombuffer(bytearray(x[2]), dtype=dtype) for x in (mine, theirs))
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(left, right, rtol=2 * eps, atol=200 * eps)
        else:
            assert mine == theirs


@of_any_kind
def test_transfers_equal_thread_ranks_bit_for_bit(tmp_path, library):
    threads = ThreadGroup(3).run(all_transfers)
    both, alone = len(MANY) + len(FEW), len(MANY)
    assert [len(moves) for moves in threads] == [both, alone, both]
    assert run_processes(all_transfers, 3, tmp_path, library) == threads


def begin_a_shift_beside_a_late_peer(begun, world):
    """Rank 1 comes once the shift of rank 0 has returned."""
    group = world.group("dcp", [[0, 1]])
    if world.global_rank == 1:
        await_file(begun)
    arriving = group.shift(torch.tensor([world.global_rank]))
    begun.touch()
    group.set_deadline(time.monotonic() - 1)  # holds for later calls only
    return int(arriving.wait())


@of_any_kind
def test_a_shift_returns_before_its_peer_has_come(tmp_path, library):
    body = partial(begin_a_shift_beside_a_late_peer, tmp_path / "begun")
    assert run_processes(body, 2, tmp_path, library) == [1, 0]


def told(call):
    """What a call raises, in words, and how long it took."""
    started = time.monotonic()
    try:
        call()
    except RankFailed as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", 0.0


def transfers(world):
    """One call of each kind, each on a group of its own: a failure ends a group."""
    groups = [world.group(kind, [[0, 1]]) for kind in ("tp", "pcp", "pp")]
    x = torch.ones(2)
    calls = [
        lambda: groups[0].shift(x).wait(),
        lambda: groups[1].send(x, 1),
        lambda: groups[2].receive((2,), x.dtype, 1),
    ]
    return groups, calls


def miss_transfers(over, world):
    groups, calls = transfers(world)
    if world.global_rank == 1:
        return await_file(over)
    found, again = [], []
    for group, call in zip(groups, calls, strict=True):
        started = time.monotonic()
        group.set_deadline(started + 1.0)
        name, text, _ = told(call)
        found.append((name, text, time.monotonic() - started))
    for group, call in zip(groups, calls, strict=True):
        group.set_deadline(time.monotonic() + LIMIT_SECONDS)
        again.append(told(call))
    over.touch()
    return found, again


def test_transfers_end_at_their_deadline(tmp_path):
    (found, again), _ = run_processes(partial(miss_transfers, tmp_path / "over"), 2, tmp_path)
    for (name, text, seconds), what in zip(
        found, ("tp shift", "pcp send to 1", "pp receive from 1"), strict=True
    ):
        assert name == "CollectiveTimeout"
        assert f"{what} of torch.float32 [2] among [0, 1]: not done within " in text
        assert 0.9 < seconds < LIMIT_SECONDS / 2
    for name, text, seconds in again:
        assert name == "RankFailed"
        assert "has failed before" in text
        assert seconds < LIMIT_SECONDS / 2


def lose_a_peer_of_transfers(world):
    groups, calls = transfers(world)
    for group in groups:
        group.all_reduce(torch.ones(1))
    if world.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    under_way = [told(call) for call in calls]
    return under_way, told(lambda: groups[0].send(torch.ones(1), 1))


def test_a_killed_peer_ends_transfers_at_once(tmp_path):
    (found, again), dead = run_processes(lose_a_peer_of_transfers, 2, tmp_path)
    assert dead is None
    for name, text, seconds in found:
        assert name == "RankFailed"
        assert "a peer " in text
        assert seconds < LIMIT_SECONDS / 2
    assert "has failed before" in again[1]


def talk(world):
    heard = [
        world.broadcast_bytes(b"plan \x00\xff" if world.global_rank == 0 else None),
        world.broadcast_bytes(b"" if world.global_rank == 0 else None),
        world.broadcast_bytes(b"back" if world.global_rank == 1 else None, src=1),
    ]
    gathered = world.all_gather_bytes(b"\x00" * world.global_rank), world.all_gather_bytes(b"")
    return heard, *gathered


def test_bytes_reach_every_rank_unchanged(tmp_path):
    heard = [b"plan \x00\xff", b"", b"back"]
    expected = (heard, [b"", b"\x00"], [b"", b""])
    assert run_processes(talk, 2, tmp_path) == [expected, expected]


def lose_a_peer(world):
    group = world.group("dcp", [[0, 1]])
    group.all_reduce(torch.ones(4))
    if world.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    texts = []
    for call in (group.all_to_all, group.all_gather):
        try:
            call(torch.ones(2, 2))
        except RankFailed as error:
            texts.append((type(error).__name__, str(error)))
    try:
        world.broadcast_bytes(b"x")
        world.all_gather_bytes(b"x")
    except RankFailed as error:
        texts.append((type(error).__name__, str(error)))
    return texts, time.monotonic() - started


def test_a_killed_peer_is_a_failed_rank_at_once_and_for_good(tmp_path):
    (texts, seconds), dead = run_processes(lose_a_peer, 2, tmp_path)
    assert dead is None
    assert seconds < LIMIT_SECONDS / 2
    names, words = zip(*texts, strict=True)
    assert names == ("RankFailed",) * 3
    assert "dcp all_to_all of torch.float32 [2, 2] among [0, 1]: a peer failed after" in words[0]
    assert "dcp all_gather" in words[1]
    assert "the group has failed before: dcp all_to_all" in words[1]
    assert "a rank is gone" in words[2]


def miss_a_deadline(over, world):
    group = world.group("dcp", [[0, 1]])
    if world.global_rank == 1:
        return await_file(over)
    texts = []
    for allowed in (1.0, LIMIT_SECONDS):
        started = time.monotonic()
        group.set_deadline(started + allowed)
        try:
            group.all_gather(torch.ones(2))
        except RankFailed as error:
            texts.append((type(error).__name__, str(error), time.monotonic() - started))
    over.touch()
    return texts


def test_a_deadline_is_a_collective_timeout(tmp_path):
    texts, _ = run_processes(partial(miss_a_deadline, tmp_path / "over"), 2, tmp_path)
    (first, words, seconds), (second, again, at_once) = texts
    assert first == "CollectiveTimeout"
    assert "dcp all_gather of torch.float32 [2] among [0, 1]: not done within " in words
    assert 0.9 < seconds < LIMIT_SECONDS / 2
    assert second == "RankFailed"
    assert "has failed before" in again
    assert at_once < LIMIT_SECONDS / 2


OWN_LIMIT_SECONDS = 5.0


def wait_beyond_the_own_limit(world):
    group = world.group("tp", [[0, 1]])
    group.set_deadline(time.monotonic() + LIMIT_SECONDS)
    if world.global_rank == 1:
        time.sleep(1.2 * OWN_LIMIT_SECONDS)
    return int(group.all_reduce(torch.tensor(1)))


@of_any_kind
def test_a_deadline_beyond_the_own_limit_is_waited_for(tmp_path, library):
    limit = OWN_LIMIT_SECONDS
    assert run_processes(wait_beyond_the_own_limit, 2, tmp_path, library, limit) == [2, 2]


def pass_a_deadline(world):
    group = world.group("dcp", [[0, 1]])
    group.set_deadline(time.monotonic() - 1)
    group.all_gather(torch.ones(0))  # nothing to move: nothing to wait for
    try:
        group.all_gather(torch.ones(1))
    except RankFailed as error:
        return type(error).__name__, str(error)


def form_wrong_groups(world):
    try:
        world.group("tp", [[0, 1], [1]])
    except TopologyError as error:
        return str(error), world.group("slice", [[0], [1]]).world_size


def both(world):
    return pass_a_deadline(world), form_wrong_groups(world)


@of_any_kind
def test_a_deadline_in_the_past_and_wrong_groups_are_refused(tmp_path, library):
    found = run_processes(both, 2, tmp_path, library)
    names = [name for (name, _), _ in found]
    # The first failure ends a world that shares memory: a later call may only be told of it.
    assert names.count("CollectiveTimeout") >= (2 if library == "gloo" else 1)
    for (_, text), (refusal, size) in found:
        assert "the deadline passed before it began" in text
        assert "exactly once" in refusal
        assert size == 1


def test_ranks_that_never_come_are_told(tmp_path):
    context = multiprocessing.get_context("forkserver")
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=lonely, args=(str(tmp_path / "store"), far), daemon=True)
    process.start()
    assert near.poll(LIMIT_SECONDS)
    error = near.recv()
    process.join(LIMIT_SECONDS)
    assert isinstance(error, RankFailed)
    assert "rank 0: 2 ranks did not form a group within 1.0 s" in str(error)


def lonely(path, pipe):
    try:
        create_torch_world(
            rank=0, world_size=2, store_path=path, timeout_seconds=1.0, interface="lo"
        )
    except RankFailed as error:
        pipe.send(error)
