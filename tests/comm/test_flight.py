"""Deadlines and failures of work under way, with works that only sleep or raise."""

from __future__ import annotations

import time

import pytest

from heddle.comm.flight import Flights
from heddle.errors import CollectiveTimeout, RankFailed


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
    flights = Flights(5.0)
    work = Work()
    flights.land(begun(flights, work))
    flights.deadline = time.monotonic() + 50
    flights.land(begun(flights, work))
    assert work.allowed == pytest.approx([5.0, 50.0], abs=0.5)


def test_a_deadline_counts_from_the_beginning_of_the_work():
    flights = Flights(0.2)
    flight = begun(flights, Work(seconds=9))
    time.sleep(0.15)
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"x: not done within 0.200 s"):
        flights.land(flight)
    assert time.monotonic() - started < 0.12


def test_work_that_ended_in_time_lands_after_its_deadline():
    flights = Flights(0.05)
    works = Work(seconds=0.01), Work()
    flight = begun(flights, *works)
    time.sleep(0.1)
    flights.land(flight)
    assert [work.allowed for work in works] == [[0.001], [0.001]]


def test_a_lost_peer_is_not_a_timeout():
    flights = Flights(5.0)
    with pytest.raises(RankFailed, match=r"x: a peer failed after 0\.0.* s: closed") as raised:
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
