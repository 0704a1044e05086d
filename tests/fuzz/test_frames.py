"""Damaged frames between driver and ranks: refused in words, or a message of the right kind."""

from __future__ import annotations

import struct
import time
import tracemalloc
from typing import Any

import msgspec
import pytest

from heddle.engine.executors.frames import MAX_FRAME_BYTES, VERSION, FrameDecoder, encode_frame
from heddle.engine.executors.messages import FromRank, ToRank
from heddle.errors import HeddleError
from tests.engine.test_executor_frames import FROM_RANK, TO_RANK
from tests.support.mutations import mutated_bytes, mutated_json, try_mutants

HEADER_BYTES = 8
BOTH = [("to rank", ToRank, TO_RANK), ("from rank", FromRank, FROM_RANK)]
ways = pytest.mark.parametrize(
    ("kind", "messages"), [way[1:] for way in BOTH], ids=[way[0] for way in BOTH]
)
counts = pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])


def framed(body: bytes) -> bytes:
    return b"HDL" + bytes([VERSION]) + struct.pack("<I", len(body)) + body


def decoded(kind: Any, stream: bytes) -> list[Any]:
    decoder: FrameDecoder[Any] = FrameDecoder(kind)
    found = list(decoder.feed(stream))
    for message in found:
        msgspec.msgpack.encode(message)  # it is whole: what was read can be written
    return found


@ways
@counts
def test_mutated_streams_are_refused_or_read(kind: Any, messages: list[Any], count: int) -> None:
    good = b"".join(map(encode_frame, messages))

    def attempt(seed: int) -> None:
        decoded(kind, mutated_bytes(good, seed))

    found = try_mutants(range(count), attempt)
    assert min(found.num_taken, found.num_refused) > count // 20
    assert found.peak_bytes < (1 << 20) + 20 * len(good)


@ways
@counts
def test_mutated_bodies_are_refused_or_read(kind: Any, messages: list[Any], count: int) -> None:
    bodies = [encode_frame(message)[HEADER_BYTES:] for message in messages]

    def attempt(seed: int) -> None:
        body = bodies[seed % len(bodies)]
        decoded(kind, framed(mutated_bytes(body, seed)))

    found = try_mutants(range(count), attempt)
    assert found.num_refused > count // 2
    assert found.num_taken > count // 100


@ways
def test_messages_of_other_shapes_are_refused_or_read(kind: Any, messages: list[Any]) -> None:
    plain = [msgspec.msgpack.decode(encode_frame(message)[HEADER_BYTES:]) for message in messages]

    def attempt(seed: int) -> None:
        value = mutated_json(plain[seed % len(plain)], seed)
        try:
            body = msgspec.msgpack.encode(value)
        except (OverflowError, UnicodeEncodeError):  # msgpack itself cannot say it
            raise HeddleError("not sent") from None
        decoded(kind, framed(body))

    found = try_mutants(range(400), attempt)
    assert min(found.num_taken, found.num_refused) > 20


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01"])
def test_a_body_without_bottom_is_refused(opening: bytes) -> None:
    with pytest.raises(HeddleError, match="no known message"):
        decoded(ToRank, framed(opening * 200_000))
    inner = msgspec.msgpack.encode({"type": "Start", "resolved": 0, "extra": 0})
    with pytest.raises(HeddleError, match="no known message"):
        decoded(ToRank, framed(inner[:-1] + opening * 200_000))


@pytest.mark.parametrize(
    "lie",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\x7f\xff\xff\xff",
    ],
)
def test_a_length_that_the_body_has_not_takes_no_memory(lie: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(HeddleError, match="no known message"):
            decoded(FromRank, framed(lie))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_of_a_legal_length_is_not_made_room_for_before_it_comes() -> None:
    header = b"HDL" + bytes([VERSION]) + struct.pack("<I", MAX_FRAME_BYTES)
    decoder: FrameDecoder[Any] = FrameDecoder(FromRank)
    tracemalloc.start()
    try:
        assert list(decoder.feed(header)) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_frame_in_small_pieces_takes_time_in_proportion_to_its_size() -> None:
    """Twice the pieces take about twice the time; with the square of it, four times."""

    def seconds(count: int) -> float:
        decoder: FrameDecoder[Any] = FrameDecoder(FromRank)
        list(decoder.feed(b"HDL" + bytes([VERSION]) + struct.pack("<I", MAX_FRAME_BYTES)))
        started = time.perf_counter()
        for _ in range(count):
            assert list(decoder.feed(bytes(1024))) == []
        return time.perf_counter() - started

    seconds(1000)
    assert min(seconds(8000) for _ in range(3)) < 40 * min(seconds(1000) for _ in range(3))
