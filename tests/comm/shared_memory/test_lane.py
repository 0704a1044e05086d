from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.comm.shared_memory import lane as lane_module
from heddle.comm.shared_memory.geometry import SHIFT_DATA, SHIFT_LINES, SHIFT_NOTES
from heddle.comm.shared_memory.lane import Incoming, Lane, Note, Outgoing
from heddle.comm.shared_memory.segment import Segment
from tests.support.shared_memory import mapped

PIECES = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "PIECE_BYTES", 4)


def lane_of(segment: Segment) -> Lane:
    memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
    slot = segment.geometry.slot("dcp", 0)
    places = (slot + SHIFT_LINES, slot + SHIFT_NOTES, slot + SHIFT_DATA)
    return Lane(segment, memory, *places, PIECES)


def message(number: int, size: int) -> torch.Tensor:
    return (torch.arange(size) * 7 + number).to(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 999))
def test_messages_arrive_whole_and_in_order_whoever_is_quicker(sizes, seed) -> None:
    turns = random.Random(seed)
    with mapped(1) as segment:
        writer, reader = lane_of(segment), lane_of(segment)
        notes = [Note(f"message {i}", i + 1, 0) for i in range(len(sizes))]
        sent = [message(i, size) for i, size in enumerate(sizes)]
        leaving = [Outgoing(writer, *pair) for pair in zip(notes, sent, strict=True)]
        received = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        arriving = [Incoming(reader, *pair) for pair in zip(notes, received, strict=True)]
        while leaving or arriving:
            queue = turns.choice([leaving, arriving])
            if queue and queue[0].advance():
                queue.pop(0)
        assert all(map(torch.equal, sent, received))
        assert writer.is_empty


def test_a_writer_stops_where_the_ring_is_full() -> None:
    with mapped(1) as segment:
        lane = lane_of(segment)
        outgoing = Outgoing(lane, Note("long", 1, 0), message(0, 4 * PIECES + 1))
        assert not outgoing.advance()
        assert lane.is_full
        lane.take(torch.empty(4, dtype=torch.uint8))
        assert outgoing.advance()


def test_a_piece_is_only_for_its_target() -> None:
    with mapped(1) as segment:
        lane = lane_of(segment)
        assert not lane.has_for(2)
        Outgoing(lane, Note("for two", 1, 2), message(0, 3)).advance()
        assert lane.has_for(2)
        assert not lane.has_for(1)


def test_another_message_is_told_from_its_words() -> None:
    with mapped(1) as segment:
        lane = lane_of(segment)
        Outgoing(lane, Note("what came", 1, 0), message(0, 3)).advance()
        incoming = Incoming(lane, Note("what was due", 2, 0), message(9, 3))
        assert incoming.advance()
        assert incoming.mismatch == "what came"
        assert not lane.is_empty  # nothing was taken
