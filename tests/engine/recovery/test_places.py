from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.recovery.places import Place, Places
from heddle.engine.recovery.suspects import Suspects


@dataclass
class Queue:
    """What of a replica is asked for: who is queued, in order of their coming."""

    index: int = 0
    queued: list[int] = field(default_factory=list)

    def admit(self, sequence: Any, bad_words: Any, matcher: Any) -> None:
        assert sequence.request_id not in self.queued
        self.queued.append(sequence.request_id)

    def withdraw(self, sequence: Any) -> None:
        self.queued.remove(sequence.request_id)

    def forget(self, sequence: Any) -> None:
        if sequence.request_id in self.queued:
            self.queued.remove(sequence.request_id)


@dataclass
class State:
    request_id: str
    sequences: list[Any]
    renewed: list[float] = field(default_factory=list)

    def renew_pin(self, now: float) -> None:
        self.renewed.append(now)


class Hall:
    """Requests r0, r1, ... of one or two sequences each, over one queue."""

    def __init__(self, *counts: int) -> None:
        self.suspects = Suspects(lambda: 0.0)
        self.places = Places(self.suspects)
        self.queue: Any = Queue()
        self.numbers: dict[str, list[int]] = {}
        for count in counts:
            self.add(count)

    def add(self, count: int) -> None:
        first = sum(map(len, self.numbers.values()))
        sequences = [SimpleNamespace(request_id=first + choice) for choice in range(count)]
        state: Any = State(f"r{len(self.numbers)}", sequences)
        self.numbers[state.request_id] = [sequence.request_id for sequence in sequences]
        for choice, sequence in enumerate(sequences):
            answer: Any = SimpleNamespace(index=choice, matcher=None)
            self.places.add(sequence.request_id, Place(state, answer, self.queue, ()))

    def try_each(self, *requests: str) -> None:
        for number in range(2):
            self.suspects.note_fault(number, requests)


def test_all_are_queued_as_they_come() -> None:
    hall = Hall(1, 2, 1)
    assert hall.queue.queued == [0, 1, 2, 3] == list(hall.places)
    assert hall.places.num_held == 0
    assert not hall.places.must_move


@given(st.lists(st.integers(1, 2), min_size=2, max_size=6), st.data())
def test_the_one_on_trial_is_queued_and_all_others_wait_until_it_has_drawn(
    counts: list[int], data: st.DataObject
) -> None:
    hall = Hall(*counts)
    tried = data.draw(st.lists(st.sampled_from(sorted(hall.numbers)), min_size=1, unique=True))
    everybody = list(hall.places)
    hall.try_each(*tried)
    new = Queue()
    hall.places.move([new], 7.0)  # type: ignore[list-item]
    hall.queue = new
    assert all(place.replica is new for place in hall.places.values())
    for name in tried:
        own = hall.numbers[name]
        assert hall.suspects.on_trial == name
        assert new.queued == own
        held = [place.sequence.request_id for place in hall.places.held()]
        assert held == [number for number in everybody if number not in own]
        assert hall.places.num_held == len(held)
        for number in own:
            assert not hall.places.must_move
            hall.suspects.note_token(number)
        assert hall.places.must_move
        hall.places.seat()
    assert new.queued == everybody
    assert hall.places.num_held == 0
    assert {tuple(place.state.renewed) for place in hall.places.values()} <= {(7.0,), (7.0, 7.0)}


def test_who_comes_during_a_trial_waits_as_well() -> None:
    hall = Hall(1, 1)
    hall.try_each("r0")
    hall.places.seat()
    hall.add(1)
    assert hall.queue.queued == [0]
    assert [place.sequence.request_id for place in hall.places.held()] == [1, 2]


def test_who_ends_leaves_its_queue_or_the_wait() -> None:
    hall = Hall(1, 1, 1)
    hall.try_each("r0")
    hall.places.seat()
    for number in (0, 1, 1):
        sequence: Any = SimpleNamespace(request_id=number)
        hall.places.remove(sequence)
    assert list(hall.places) == [2]
    assert hall.queue.queued == []
    assert hall.places.num_held == 1


def test_requests_under_way_are_told_once_and_oldest_first() -> None:
    hall = Hall(2, 1, 1)
    replica: Any = SimpleNamespace(
        requests_under_way=lambda: [SimpleNamespace(request_id=number) for number in (3, 1, 0, 99)]
    )
    assert hall.places.requests_under_way([replica]) == ["r0", "r2"]
