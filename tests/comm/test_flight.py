"""Deadlines and failures of work under way, with works that only sleep or raise."""

from __future__ import annotations

import time

import pytest

from heddle.comm.flight import Flights
from heddle.errors import CollectiveTimeout, RankFailed
from tests.support.processes import LONG_SECONDS


class Work:
    """Ends after some seconds, or raises; as gloo does, raises when waited for too briefly."""

    def __init__(self, seconds=0.0, error=None):
        self.done = time.monotonic() + seconds
        self.error = error
        self.allowed = []

    def wait(self, limit):
        self.allowed.append(limit.total_seconds())
        assert limit.total_seconds() >= 0.001  # torch reads less as its own limit
        remaining = self.done - time.monotonic()
        time.sleep(max(0.0, min(remaining, limit.total_seconds())))
        if self.error or remaining > limit.total_seconds():
            raise RuntimeError(self.error or "timed out")


def begun(flights, *works):
    return flights.begin("x", lambda: works)


def test_work_lands_within_the_own_limit_or_the_deadline():
    flights = Flights(600.0)
    work = Work()
    flights.land(begun(flights, work))
    flights.deadline = time.monotonic() + 6000
    flights.land(begun(flights, work))
    own, other = work.allowed
    assert 300 < own <= 600 < 3000 < other <= 6000


def test_a_deadline_counts_from_the_beginning_of_the_work():
    flights = Flights(0.2)
    work = Work(seconds=LONG_SECONDS)
    flight = begun(flights, work)
    time.sleep(0.15)
    with pytest.raises(CollectiveTimeout, match=r"x: not done within 0.200 s"):
        flights.land(flight)
    (allowed,) = work.allowed
    assert allowed <= 0.2 - 0.15 + 1e-6


def test_work_that_ended_in_time_lands_after_its_deadline():
    flights = Flights(0.05)
    works = Work(seconds=0.01), Work()
    flight = begun(flights, *works)
    time.sleep(0.1)
    flights.land(flight)
    assert [work.allowed for work in works] == [[0.001], [0.001]]


def test_a_lost_peer_is_not_a_timeout():
    flights = Flights(LONG_SECONDS)
    with pytest.raises(RankFailed, match=r"x: a peer failed after \d+\.\d+ s: closed") as raised:
        flights.land(begun(flights, Work(), Work(error="closed")))
    assert type(raised.value) is RankFailed
    assert str(raised.value.__cause__) == "closed"


def test_a_peer_that_is_gone_when_work_begins_is_told():
    def start():
        raise RuntimeError("closed")

    with pytest.raises(RankFailed, match="x: a peer is gone: closed"):
        Flights(5.0).begin("x", start)


def test_after_a_failure_nothing_begins_and_nothing_lands():
    flights = Flights(5.0)
    later = begun(flights, Work())
    flights.deadline = time.monotonic() - 1
    with pytest.raises(CollectiveTimeout, match="x: the deadline passed before it began"):
        begun(flights, Work())
    flights.deadline = None
    for call in (lambda: flights.land(later), lambda: begun(flights, Work())):
        with pytest.raises(RankFailed, match="failed before: x: the deadline passed"):
            call()
