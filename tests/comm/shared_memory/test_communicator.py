"""What only ranks that share memory promise; laws of process ranks of any kind are held by
`tests/comm/test_torch_group.py`.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
import torch

from heddle.comm.blocks import sum_in_order
from heddle.comm.shared_memory.geometry import BOX_BYTES, PIECE_BYTES, SHIFT_PIECES
from heddle.errors import CollectiveTimeout, HeddleError, PlanMismatch, RankFailed
from tests.support.process_ranks import LIMIT_SECONDS, packed, run_processes
from tests.support.processes import await_file

pytestmark = pytest.mark.dist
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
LONG = 2 * BOX_BYTES + 24
"""Bytes of a block: three rounds, the last one nearly empty."""


def told(call):
    """What a call raises, and how long it took."""
    started = time.monotonic()
    try:
        call()
    except HeddleError as error:
        return type(error), str(error), time.monotonic() - started
    return None, "", time.monotonic() - started


def rows_of(rank, dtype, size, seed):
    """[size, LONG bytes]: values whose sums are rounded, and depend on the order of adding."""
    items = LONG // dtype.itemsize
    steps = torch.arange(size * items, dtype=torch.float32).view(size, items)
    return torch.sin(steps * (rank + 1) + seed).mul_(10.0**rank).to(dtype)


def long_calls(world):
    """Whether tensors beyond every buffer come out as they must, over groups in any order."""
    found = []
    for kind, ranks in (("tp", [2, 0, 1]), ("dcp", [0, 1])):
        lists = [ranks] if len(ranks) == 3 else [ranks, [2]]
        group = world.group(kind, lists)
        size = group.world_size
        for seed, dtype in enumerate((torch.float32, torch.bfloat16) if size > 1 else ()):
            everyone = [rows_of(rank, dtype, size, seed) for rank in ranks]
            mine = everyone[group.rank]
            shares = [rows[group.rank] for rows in everyone]
            pairs = [
                (group.all_gather(mine[0]), torch.stack([rows[0] for rows in everyone])),
                (group.all_to_all(mine), torch.stack(shares)),
                (group.reduce_scatter(mine), sum_in_order(shares)),
                (group.all_reduce(mine.T), sum_in_order([rows.T for rows in everyone])),
            ]
            found += [packed(got) == packed(due) for got, due in pairs]
    return found


def test_messages_longer_than_the_buffers_come_in_parts(tmp_path):
    found = run_processes(long_calls, 3, tmp_path, "shm")
    assert found == [[True] * 16, [True] * 16, [True] * 8]


def long_transfers(world):
    group = world.group("pp", [[0, 1]])
    size = (SHIFT_PIECES + 2) * PIECE_BYTES + 5
    mine = (torch.arange(size) % 251 + group.rank).to(torch.uint8)
    theirs = (torch.arange(size) % 251 + 1 - group.rank).to(torch.uint8)
    rings = [group.shift(mine), group.shift(mine + 1)]
    total = group.all_reduce(torch.ones(1))  # between a shift and its end
    same = [torch.equal(rings[1].wait(), theirs + 1), torch.equal(rings[0].wait(), theirs)]
    if group.rank == 0:
        group.send(mine, 1)
        same.append(torch.equal(group.receive((size,), torch.uint8, 1), mine))
    else:
        taken = group.receive((size,), torch.uint8, 0)
        group.send(taken, 0)
        same.append(torch.equal(taken, theirs))
    return same, float(total)


def test_transfers_longer_than_the_ring_come_whole(tmp_path):
    assert run_processes(long_transfers, 2, tmp_path, "shm") == [([True] * 3, 2.0)] * 2


def many_ranks(world):
    group = world.group("dcp", [[3, 1, 0, 2]])
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    started = time.monotonic()
    for number in range(50):
        x = torch.full((4, 3), float(10 * number + group.rank))
        assert group.all_to_all(x)[:, 0].tolist() == [10.0 * number + place for place in range(4)]
        assert group.all_reduce(x)[0, 0] == 40 * number + 6
        assert group.shift(x).wait()[0, 0] == 10 * number + (group.rank - 1) % 4
    return time.monotonic() - started


def test_more_ranks_than_cores_do_not_starve_each_other(tmp_path):
    times = run_processes(many_ranks, 4, tmp_path, "shm")
    assert len(times) == 4
    assert max(times) < LIMIT_SECONDS / 2  # 150 calls: below a second when nothing else runs


def mismatched(world):
    group = world.group("dcp", [[1, 0]])
    group.all_reduce(torch.ones(2))
    call = group.all_gather if world.global_rank == 0 else group.all_reduce
    again = group.all_reduce
    return told(lambda: call(torch.ones(3)))[:2], told(lambda: again(torch.ones(3)))[:2]


def test_calls_that_differ_name_both_calls_and_ranks(tmp_path):
    first, second = run_processes(mismatched, 2, tmp_path, "shm")
    one, other = "all_gather of torch.float32 [3]", "all_reduce of torch.float32 [3]"
    by_first = f"dcp call 2: rank 0 makes {one}, rank 1 makes {other}"
    by_second = f"dcp call 2: rank 1 makes {other}, rank 0 makes {one}"
    for (kind, text), (again, text_again) in (first, second):
        assert (kind, again) == (PlanMismatch, PlanMismatch)
        assert text in (by_first, by_second)
        assert text in text_again  # and so for good


def crossed_groups(world):
    lists = [[0, 1], [2, 3]] if world.global_rank < 2 else [[1, 0], [3, 2]]
    return told(lambda: world.group("tp", lists).all_reduce(torch.ones(1)))[:2]


def crossed_kinds(world):
    group = world.group("tp", [[0, 1]])
    once = world.group("tp", [[0, 1]])
    return once is group, told(lambda: world.group("tp", [[1, 0]]))[:2]


def test_a_kind_is_formed_from_one_partition_only(tmp_path):
    found = run_processes(crossed_groups, 4, tmp_path, "shm")
    texts = [text for kind, text in found if kind is PlanMismatch]
    assert texts
    assert all("groups ((" in text and "of rank" in text for text in texts)
    for same, (kind, text) in run_processes(crossed_kinds, 2, tmp_path, "shm"):
        assert same
        assert kind is PlanMismatch
        assert text == "tp groups ((1, 0),) differ from the earlier ((0, 1),)"


def swapped_members(world):
    lists = [[0, 1]] if world.global_rank == 0 else [[1, 0]]
    return told(lambda: world.group("tp", lists).all_reduce(torch.ones(1)))[:2]


def test_members_in_another_order_are_a_mismatch_on_both(tmp_path):
    late = "tp groups ((1, 0),) of rank 1 differ from those of rank 0"
    early = "tp groups ((0, 1),) of rank 0 differ from those of rank 1"
    for kind, text in run_processes(swapped_members, 2, tmp_path, "shm"):
        assert kind is PlanMismatch
        assert text in (late, early)


def miss_a_call(over, world):
    """Rank 1 comes when rank 0 has been told; rank 2 would wait for long."""
    group = world.group("dcp", [[0, 1, 2]])
    if world.global_rank == 1:
        await_file(over)
        return told(lambda: group.all_reduce(torch.ones(2)))
    started = time.monotonic()
    group.set_deadline(started + (1.0 if world.global_rank == 0 else LIMIT_SECONDS))
    kind, text, _ = told(lambda: group.all_reduce(torch.ones(2)))
    over.touch()
    return kind, text, time.monotonic() - started


def test_a_missing_rank_is_named_by_the_deadline_and_ends_the_world(tmp_path):
    (kind, text, seconds), (late, why, _), (other, words, waited) = run_processes(
        partial(miss_a_call, tmp_path / "over"), 3, tmp_path, "shm"
    )
    what = "dcp call 1, all_reduce of torch.float32 [2]"
    assert kind is CollectiveTimeout
    assert text in (
        f"{what}: rank 0 waited until the deadline; missing ranks: [1]",
        f"{what}: rank 0 waited until the deadline; missing ranks: [1, 2]",
    )
    assert 1.0 <= seconds < LIMIT_SECONDS / 2
    assert (late, other) == (RankFailed, RankFailed)
    # Told where it waits; rank 1, and rank 2 if it is late, when it begins.
    why_waiting = f"{what}: rank 0 failed first: CollectiveTimeout: {text}"
    assert why == why_waiting.replace("dcp call 1, ", "dcp ", 1)
    assert words in (why_waiting, why)
    assert waited < LIMIT_SECONDS / 2


def die_in_a_collective(world):
    groups = [world.group(kind, [[0, 1, 2]]) for kind in ("tp", "pp")]
    groups[0].all_reduce(torch.ones(4))
    if world.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(BOX_BYTES) if world.global_rank == 0 else torch.ones(4)
    call = groups[0].all_reduce if world.global_rank == 0 else groups[1].all_gather
    return told(lambda: call(x)), told(lambda: groups[1].all_gather(x))


def test_a_killed_rank_ends_all_calls_at_once_and_leaves_nothing(tmp_path):
    before = set(os.listdir("/dev/shm"))
    first, dead, last = run_processes(die_in_a_collective, 3, tmp_path, "shm")
    assert dead is None
    texts = []
    for (kind, text, seconds), (again, text_again, at_once) in (first, last):
        assert kind is again is RankFailed
        assert seconds < LIMIT_SECONDS / 2  # 0.005 s when nothing else runs
        assert at_once < LIMIT_SECONDS / 2
        assert "the process of rank 1 has ended" in text_again
        texts.append(text)
    assert any(
        "a peer is gone: the process of rank 1 has ended" in text and "failed first" not in text
        for text in texts
    )
    assert set(os.listdir("/dev/shm")) <= before


def raise_on_one(world):
    group = world.group("dcp", [[0, 1]])
    if world.global_rank == 1:
        world.abort(ValueError("boom"))
        world.abort(KeyError("later"))
        return told(lambda: group.all_reduce(torch.ones(1)))[:2]
    return told(lambda: group.all_reduce(torch.ones(1)))


def test_a_rank_that_failed_is_named_with_its_first_cause(tmp_path):
    (kind, text, seconds), (own, own_text) = run_processes(raise_on_one, 2, tmp_path, "shm")
    assert kind is own is RankFailed
    assert text.endswith("rank 1 failed first: ValueError: boom")
    assert own_text == "the world has failed before: ValueError: boom"
    assert seconds < LIMIT_SECONDS / 2


def leave_early(world):
    group = world.group("dcp", [[0, 1]])
    if world.global_rank == 1:
        return None  # the world is left as soon as the body ends
    return told(lambda: group.send(torch.ones(1), 1))


def test_a_rank_that_has_left_is_no_hang(tmp_path):
    (kind, text, seconds), _ = run_processes(leave_early, 2, tmp_path, "shm")
    what = "dcp send to 1, transfer of torch.float32 [1]"
    assert kind is PlanMismatch
    assert text == f"{what}: ranks [1] returned without making it"
    assert seconds < LIMIT_SECONDS / 2


def keep_inputs(world):
    """Inputs stay, results are fresh, and a call prepared before takes new values."""
    group = world.group("dcp", [[0, 1]])
    x = torch.arange(6.0).view(2, 3) + group.rank
    kept, found = x.clone(), []
    for operation in OPERATIONS:
        first = getattr(group, operation)(x)
        copy = first.clone()
        getattr(group, operation)(x * 2)
        getattr(group, operation)(x * 3)
        found.append(bool(torch.equal(first, copy)) and bool(torch.equal(x, kept)))
        found.append(first.is_contiguous())
    return found


def test_results_are_fresh_and_inputs_stay(tmp_path):
    assert run_processes(keep_inputs, 2, tmp_path, "shm") == [[True] * 8] * 2
