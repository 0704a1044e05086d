"""Ranks that come, leave, fail or die, seen by the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from heddle.comm.shared_memory.roll import Roll
from heddle.comm.shared_memory.segment import Segment, create_segment
from heddle.errors import HeddleError, PlanMismatch, RankFailed
from tests.support.shared_memory import mapped

pytestmark = pytest.mark.dist


def test_ranks_that_never_come_are_named() -> None:
    with mapped(3) as segment:
        roll = Roll(segment, 1)
        with pytest.raises(RankFailed, match=r"within 0.1 s; missing ranks: \[0, 2\]"):
            roll.await_all(0.1)
        Roll(segment, 0)
        Roll(segment, 2)
        roll.await_all(0.1)


def test_a_failure_is_told_in_the_words_of_its_rank_and_cut_to_a_page() -> None:
    with mapped(2) as segment:
        first, second = Roll(segment, 0), Roll(segment, 1)
        first.check("nothing is wrong")
        second.abort(ValueError("x" * 5000))
        with pytest.raises(RankFailed) as caught:
            first.check("tp call 3")
        assert str(caught.value).startswith("tp call 3: rank 1 failed first: ValueError: xxx")
        assert 4000 < len(str(caught.value)) < 4200
        with pytest.raises(RankFailed, match="the world has failed before: ValueError: xxx"):
            second.check("tp call 4")


def test_a_disagreement_stays_one() -> None:
    with mapped(2) as segment:
        first, second = Roll(segment, 0), Roll(segment, 1)
        second.fail(PlanMismatch("rank 1 makes this, rank 0 makes that"))
        with pytest.raises(PlanMismatch, match=r"^rank 1 makes this, rank 0 makes that$"):
            first.check("tp call 3")


def take_place(path: str, rank: int, pipe) -> None:  # type: ignore[no-untyped-def]
    roll = Roll(Segment(os.open(path, os.O_RDWR), 2), rank)
    pipe.send("here")
    if pipe.recv() == "leave":
        roll.leave()
        pipe.send("left")
    time.sleep(60)


@pytest.mark.parametrize("end", ["kill", "leave"])
def test_a_process_that_ended_or_left_is_seen_and_one_that_sleeps_is_not(end: str) -> None:
    descriptor = create_segment(2)
    segment = Segment(descriptor, 2)
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    process = context.Process(target=take_place, args=(path, 1, far), daemon=True)
    process.start()
    assert process.pid is not None
    assert near.recv() == "here"
    roll = Roll(segment, 0)
    os.kill(process.pid, signal.SIGSTOP)
    roll.check_peers("tp call 1", [1])  # it lives
    with pytest.raises(HeddleError, match="rank 1 of this world is another process already"):
        Roll(segment, 1)
    os.kill(process.pid, signal.SIGCONT)
    if end == "leave":
        near.send("leave")
        assert near.recv() == "left"
        with pytest.raises(PlanMismatch, match=r"tp call 1: ranks \[1\] returned without"):
            roll.check_peers("tp call 1", [1])
    process.kill()
    process.join()
    if end == "kill":
        with pytest.raises(RankFailed, match=r"tp call 1: a peer is gone: .* rank 1 has ended"):
            roll.check_peers("tp call 1", [1])
    segment.close()
