from __future__ import annotations

import time

import pytest
import torch

from heddle.comm.shared_memory.geometry import PIECE_BYTES, SHIFT_PIECES
from heddle.comm.shared_memory.segment import Segment
from heddle.comm.shared_memory.transfers import Transfers
from heddle.errors import CollectiveTimeout, PlanMismatch
from tests.support.shared_memory import FakeRoll, in_threads, mapped, patience_of, until

LONG = (SHIFT_PIECES + 1) * PIECE_BYTES + 3
"""Bytes for which the ring has no room."""


class Member:
    """One rank's transfers, and what it waits with."""

    def __init__(self, segment: Segment, place: int, size: int) -> None:
        slots = [segment.geometry.slot("pp", position) for position in range(size)]
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        roll = FakeRoll()
        self.patience = patience_of(roll)
        self.transfers = Transfers(
            segment,
            memory,
            roll,
            self.patience,
            "pp",
            range(10, 10 + size),
            place,
            slots,  # type: ignore[arg-type]
        )


def bytes_of(number: int, size: int) -> torch.Tensor:
    return (torch.arange(size) % 251 + number).to(torch.uint8)


def test_a_shift_beyond_the_ring_ends_whatever_is_waited_for_first() -> None:
    """One rank waits for something else before its shift, the other for the shift at once."""
    with mapped(2) as segment:
        members = [Member(segment, place, 2) for place in range(2)]
        received = [torch.empty(LONG, dtype=torch.uint8) for _ in range(2)]
        arrived = []

        def run(place: int) -> None:
            member = members[place]
            sent = bytes_of(place, LONG)
            land = member.transfers.begin_shift("x", 1, sent, received[place], until())
            if place == 0:
                assert member.patience.chores  # the rest moves while it waits
                member.patience.wait(lambda: bool(arrived), lambda: "other", list, until())
            land()
            arrived.append(place)
            assert not member.patience.chores

        assert in_threads([lambda: run(0), lambda: run(1)]) == [None, None]
        assert arrived == [1, 0]
        assert torch.equal(received[0], bytes_of(1, LONG))
        assert torch.equal(received[1], bytes_of(0, LONG))


def test_a_hand_over_ends_when_its_receiver_has_it() -> None:
    with mapped(3) as segment:
        giver, taker, idle = (Member(segment, place, 3) for place in range(3))
        received = torch.empty(LONG, dtype=torch.uint8)
        times = {}

        def give() -> None:
            giver.transfers.send("x", 1, bytes_of(3, LONG), 1, until())
            times["given"] = time.monotonic()

        def take() -> None:
            time.sleep(0.2)
            times["taking"] = time.monotonic()
            taker.transfers.receive("x", 1, received, 0, until())

        assert in_threads([give, take]) == [None, None]
        assert times["given"] > times["taking"]
        assert torch.equal(received, bytes_of(3, LONG))
        with pytest.raises(CollectiveTimeout, match=r"pp receive from 10, x: .* ranks: \[10\]"):
            idle.transfers.receive("x", 1, received, 0, until(0.05))


def test_a_peer_that_does_not_come_is_named() -> None:
    with mapped(2) as segment:
        member = Member(segment, 0, 2)
        x = bytes_of(0, 4)
        with pytest.raises(CollectiveTimeout, match=r"pp send to 11, x: .* ranks: \[11\]"):
            member.transfers.send("x", 1, x, 1, until(0.05))
        member = Member(segment, 0, 2)
        land = member.transfers.begin_shift("x", 1, x, x.clone(), until(0.05))
        with pytest.raises(CollectiveTimeout, match=r"pp shift, x: .* missing ranks: \[11\]"):
            land()


def test_something_else_than_announced_is_a_mismatch() -> None:
    with mapped(2) as segment:
        one, two = (Member(segment, place, 2) for place in range(2))
        x = bytes_of(0, 4)
        land = one.transfers.begin_shift("a", 1, x, x.clone(), until())
        other = two.transfers.begin_shift("b", 2, x, x.clone(), until())
        with pytest.raises(PlanMismatch, match=r"pp shift, a: rank 10 expects it, rank 11 makes b"):
            land()
        with pytest.raises(PlanMismatch, match="rank 11 expects it, rank 10 makes a"):
            other()

        def take() -> None:
            two.transfers.receive("c", 3, x.clone(), 0, until())

        _, told = in_threads([lambda: one.transfers.send("d", 4, x, 1, until(0.5)), take])
        assert isinstance(told, PlanMismatch)
        assert str(told) == "pp receive from 10, c: rank 11 expects it, rank 10 makes d"
