from __future__ import annotations

import threading
import time

from heddle.comm.shared_memory.patience import Until
from heddle.comm.shared_memory.rounds import Rounds
from heddle.comm.shared_memory.segment import Segment, digest_of
from heddle.errors import CollectiveTimeout, PlanMismatch
from tests.support.processes import LONG_SECONDS
from tests.support.shared_memory import FakeRoll, in_threads, mapped, patience_of, until

RANKS = (4, 2, 7)


def members(segment: Segment) -> list[Rounds]:
    slots = [segment.geometry.slot("dcp", position) for position in range(len(RANKS))]
    found = []
    for place in range(len(RANKS)):
        roll = FakeRoll()
        patience = patience_of(roll)
        found.append(Rounds(segment, roll, patience, "dcp", RANKS, place, slots))  # type: ignore[arg-type]
    return found


def test_nobody_passes_a_round_before_all_have_come() -> None:
    with mapped(3) as segment:
        rounds, passed = members(segment), [0, 0, 0]

        def run(place: int) -> int:
            for number in range(1, 200):
                if number % 50 == place:
                    time.sleep(0.002)
                rounds[place].exchange(digest_of("x"), "x", until)
                passed[place] = number
                assert rounds[place].number == number
                assert max(passed) - min(passed) <= 1  # what two boxes rely on
            return passed[place]

        assert in_threads([lambda p=p: run(p) for p in range(3)]) == [199, 199, 199]


def test_calls_that_differ_name_both_on_every_rank() -> None:
    with mapped(3) as segment:
        rounds = members(segment)

        def run(place: int) -> None:
            for words in ("same", "same", "odd" if place == 1 else "even"):
                rounds[place].exchange(digest_of(words), words, until)

        found = in_threads([lambda p=p: run(p) for p in range(3)])
    assert all(type(error) is PlanMismatch for error in found)
    texts = list(map(str, found))
    assert texts[0] == "dcp call 3: rank 4 makes even, rank 2 makes odd"
    assert texts[1] == "dcp call 3: rank 2 makes odd, rank 4 makes even"
    assert texts[2] == "dcp call 3: rank 7 makes even, rank 2 makes odd"


def test_who_has_not_come_is_named() -> None:
    with mapped(3) as segment:
        rounds = members(segment)
        come = {place: threading.Event() for place in (0, 2)}

        def waiting(place: int) -> Until:
            """Asked once a rank has come and has to wait."""
            come[place].set()
            assert all(event.wait(LONG_SECONDS) for event in come.values())
            return until(0.3, RANKS[place])

        def run(place: int) -> None:
            rounds[place].exchange(1, "words", lambda: waiting(place))

        first, last = in_threads([lambda: run(0), lambda: run(2)])
    assert isinstance(first, CollectiveTimeout)
    assert isinstance(last, CollectiveTimeout)
    said = "dcp call 1, words: rank 4 waited until a limit of 0.3 s; missing ranks: [2]"
    assert str(first) == said
