"""The door by its laws: bounds, counts that come back to zero, and honest times."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heddle.config import SchedulerConfig
from heddle.errors import EngineOverloaded
from heddle.scheduler.door import FADE_SECONDS, POOLS_QUEUED, Door, DrainRate


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make(max_requests=0, max_tokens=0):
    clock = Clock()
    return Door(max_requests=max_requests, max_tokens=max_tokens, clock=clock), clock


class DoorMachine(RuleBasedStateMachine):
    """Against two plain lists."""

    @initialize(max_requests=st.integers(0, 4), max_tokens=st.integers(0, 40))
    def make(self, max_requests, max_tokens):
        self.door, self.clock = make(max_requests, max_tokens)
        self.queued, self.inside = [], []

    @rule(prompt=st.integers(1, 30), output=st.integers(0, 20), n=st.integers(1, 3))
    def enter(self, prompt, output, n):
        need = n * (prompt + max(output - 1, 0))
        tokens = sum(number for _, number in self.queued) + need
        is_over = (self.door.max_requests and len(self.queued) + 1 > self.door.max_requests) or (
            self.door.max_tokens and tokens > self.door.max_tokens
        )
        if self.queued and is_over:
            with pytest.raises(EngineOverloaded) as caught:
                self.door.enter(prompt, output, n)
            assert 1 <= caught.value.retry_after_seconds <= 60
        else:
            self.queued.append((self.door.enter(prompt, output, n), need))

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def start(self, data):
        entry = data.draw(st.sampled_from(self.queued))
        self.queued.remove(entry)
        self.inside.append(entry)
        self.door.started(entry[0])
        self.door.started(entry[0])

    @precondition(lambda self: self.queued or self.inside)
    @rule(data=st.data())
    def leave(self, data):
        entry = data.draw(st.sampled_from(self.queued + self.inside))
        (self.queued if entry in self.queued else self.inside).remove(entry)
        self.door.left(entry[0])
        self.door.left(entry[0])
        self.door.started(entry[0])

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def take_back(self, data):
        entry = data.draw(st.sampled_from(self.queued))
        self.queued.remove(entry)
        self.door.take_back(entry[0])
        self.door.take_back(entry[0])
        self.door.left(entry[0])

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def counts_are_those_of_the_lists(self):
        if hasattr(self, "door"):
            everyone = self.queued + self.inside
            assert self.door.num_queued_requests == len(self.queued)
            assert self.door.num_queued_tokens == sum(need for _, need in self.queued)
            assert self.door.num_open_requests == len(everyone)
            assert self.door.num_open_tokens == sum(need for _, need in everyone)

    def teardown(self):
        if hasattr(self, "door"):
            for ticket, _ in self.queued + self.inside:
                self.door.left(ticket)
            door = self.door
            assert (door.num_queued_requests, door.num_queued_tokens) == (0, 0)
            assert (door.num_open_requests, door.num_open_tokens) == (0, 0)


TestDoor = DoorMachine.TestCase


def test_a_refusal_has_all_numbers():
    door, clock = make(max_requests=2, max_tokens=100)
    first = door.enter(30, 11)
    clock.now += 2
    door.enter(20, 1)
    door.started(first)
    door.enter(50, 1)
    with pytest.raises(EngineOverloaded) as caught:
        door.enter(40, 21)
    assert str(caught.value) == (
        "the engine is overloaded: 2 requests are queued (limit 2), which may need 70 KV tokens "
        "(limit 100), and this one may need 60; try again in 2 s"
    )
    assert caught.value.code == "engine_overloaded"


def test_an_empty_queue_takes_what_is_above_the_limit_and_a_limit_of_zero_all():
    door, _ = make(max_tokens=10)
    assert door.enter(500, 500).num_kv_tokens == 999
    with pytest.raises(EngineOverloaded, match=r"\(limit off\).*999.*\(limit 10\).* need 1;"):
        door.enter(1, 1)
    door, _ = make()
    for _ in range(2000):
        door.enter(10**6, 1)
    assert door.num_queued_requests == 2000


@given(
    st.floats(0.05, 20.0),
    st.integers(10, 400),
    st.integers(1, 300),
    st.integers(4, 40),
)
def test_who_comes_back_when_told_is_taken(per_second, size, wanted, length):
    """A queue of equal requests that is drained at a steady rate, and refilled by nobody."""
    door, clock = make(max_tokens=size * length)
    queue = deque(door.enter(size, 1) for _ in range(length))
    gap = 1 / per_second
    for _ in range(30):  # drained and refilled, so that the rate is known
        clock.now += gap
        door.started(queue.popleft())
        queue.append(door.enter(size, 1))
    with pytest.raises(EngineOverloaded) as caught:
        door.enter(wanted, 1)
    retry_after = caught.value.retry_after_seconds
    told_too_soon = retry_after == 60
    exact = math.ceil(min(wanted, size * length) / size) * gap
    assert retry_after <= max(1, exact / 0.9 + 1)
    end = clock.now + retry_after
    while queue and clock.now + gap <= end * (1 + 1e-12) + gap:  # one departure of slack
        clock.now += gap
        door.started(queue.popleft())
    assert told_too_soon or door.enter(wanted, 1)


def test_a_queue_that_stands_still_is_told_longer_and_longer_times():
    door, clock = make(max_requests=2)
    door.enter(1, 1)
    ticket = door.enter(1, 1)
    told = []

    def ask():
        with pytest.raises(EngineOverloaded) as caught:
            door.enter(1, 1)
        told.append(caught.value.retry_after_seconds)

    ask()
    for _ in range(4):
        clock.now += 5
        ask()
    assert told == sorted(told)
    assert (told[0], told[1]) == (1, 5)  # nothing has ever left: as long as was waited
    door.started(ticket)
    door.enter(1, 1)
    ask()
    known = told[-1]
    clock.now += 2 * FADE_SECONDS
    ask()
    assert known < told[-1] <= 60


def test_what_was_taken_back_is_no_sign_of_a_fast_queue():
    door, clock = make(max_requests=2)
    door.enter(1, 1)
    for _ in range(3):
        clock.now += 10
        ticket = door.enter(1, 1)
        with pytest.raises(EngineOverloaded) as caught:
            door.enter(1, 1)
        door.take_back(ticket)
    assert caught.value.retry_after_seconds == math.ceil(FADE_SECONDS * (1 - math.exp(-1)))


def test_time_without_a_queue_is_no_evidence():
    door, clock = make(max_requests=1)
    ticket = door.enter(1, 1)
    clock.now += 2
    door.started(ticket)
    clock.now += 10_000
    door.enter(1, 1)
    with pytest.raises(EngineOverloaded) as caught:
        door.enter(1, 1)
    assert caught.value.retry_after_seconds == 2


@given(st.lists(st.tuples(st.floats(0.01, 10.0), st.integers(0, 9)), min_size=1, max_size=20))
def test_a_rate_is_between_the_slowest_and_the_fastest_that_it_saw(spells):
    rate = DrainRate()
    for seconds, amount in spells:
        rate.wait(seconds)
        rate.leave(amount)
    seen = [amount / seconds for seconds, amount in spells]
    if any(amount for _, amount in spells):
        # What leaves at the end of a spell is younger than the spell: it counts a little more.
        assert min(seen) <= rate.per_second <= max(seen) * math.exp(10.0 / FADE_SECONDS)
    else:
        assert rate.per_second is None


def test_limits_come_from_the_settings():
    clock = Clock()
    door = Door.from_config(SchedulerConfig(), pool_tokens=100, clock=clock)
    assert (door.max_requests, door.max_tokens) == (1024, 100 * POOLS_QUEUED)
    config = SchedulerConfig(max_num_queued_reqs=0, max_num_queued_tokens=0)
    assert Door.from_config(config, 100, clock).max_tokens == 0
    config = SchedulerConfig(max_num_queued_tokens=77)
    assert Door.from_config(config, 100, clock).max_tokens == 77
