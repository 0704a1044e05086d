from __future__ import annotations

import time

import pytest

from heddle.comm.shared_memory.patience import Patience
from heddle.errors import CollectiveTimeout, HeddleError, RankFailed
from tests.support.shared_memory import FakeRoll, patience_of, until


def never() -> bool:
    return False


def test_what_is_ready_is_not_waited_for() -> None:
    roll, looks = FakeRoll(), []
    patience_of(roll).wait(lambda: not looks.append(1), lambda: "tp call", list, until(-1.0))
    assert looks == [1]
    assert roll.failure is None


def test_a_deadline_names_the_call_and_who_is_missing() -> None:
    roll = FakeRoll()
    text = "tp call: rank 3 waited until a limit of 0.05 s; missing ranks: .5, 6."
    with pytest.raises(CollectiveTimeout, match=text):
        patience_of(roll).wait(never, lambda: "tp call", lambda: [5, 6], until(0.05, 3))
    assert isinstance(roll.failure, CollectiveTimeout)


def test_a_failure_elsewhere_ends_the_wait() -> None:
    roll = FakeRoll()
    roll.failure = RankFailed("rank 1 failed first")
    with pytest.raises(RankFailed, match="rank 1 failed first"):
        patience_of(roll).wait(never, lambda: "tp call", lambda: [1], until())


def test_a_peer_that_is_gone_ends_the_wait() -> None:
    roll = FakeRoll()
    roll.gone = {1, 7}
    with pytest.raises(HeddleError, match=r"tp call: \[1\] are gone"):
        patience_of(roll).wait(never, lambda: "tp call", lambda: [0, 1], until())


def test_chores_are_done_meanwhile() -> None:
    patience, done = patience_of(FakeRoll()), []
    patience.chores.append(lambda: done.append(1))
    patience.wait(lambda: len(done) == 3, lambda: "tp call", list, until())
    assert len(done) == 3


@pytest.mark.parametrize("is_crowded", [False, True])
def test_a_long_wait_leaves_the_core_to_others(is_crowded: bool) -> None:
    patience = Patience(FakeRoll(), is_crowded=is_crowded)  # type: ignore[arg-type]
    end, looks = time.monotonic() + 0.5, []

    def is_ready() -> bool:
        looks.append(1)
        return time.monotonic() > end

    patience.wait(is_ready, lambda: "tp call", list, until())
    # Between looks it sleeps: briefly at first, then a millisecond. One that spins looks a hundred
    # thousand times.
    assert len(looks) < 1000
