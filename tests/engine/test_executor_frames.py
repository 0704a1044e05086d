"""Frames survive any cut of the stream, and damage is an error in words."""

from __future__ import annotations

import socket
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.executors.frames import (
    VERSION,
    BlockingChannel,
    FrameDecoder,
    encode_frame,
)
from heddle.engine.executors.messages import (
    Failed,
    FromRank,
    Progress,
    Ready,
    Reply,
    Start,
    Step,
    Stop,
    ToRank,
)
from heddle.errors import HeddleError
from heddle.step.batch import RankReply, SampledToken
from tests.support.fake_worker import FAKE, fake_batch, fake_config

TO_RANK = [
    Start(fake_config({"1:2": "kill"}, tp=2), 1, FAKE, "/tmp/x"),
    Step(fake_batch(3), 2**64 - 1, 8.0),
    Stop(),
]
FROM_RANK = [
    Progress(1, 2),
    Ready(),
    Reply(
        RankReply(
            epoch=0,
            step=3,
            digest=2**64 - 1,
            coverage=(2**63,),
            sampled=(SampledToken(request_id=1, token_id=5, logits=b"\x00\xff"),),
        )
    ),
    Failed("ValueError: boom", "RankFailed", "Traceback", False, True),
]


@given(st.lists(st.sampled_from(TO_RANK), min_size=1, max_size=4), st.data())
def test_messages_arrive_whole_however_the_stream_is_cut(
    messages: list[msgspec.Struct], data: st.DataObject
) -> None:
    stream = b"".join(map(encode_frame, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder: FrameDecoder[ToRank] = FrameDecoder(ToRank)
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += list(decoder.feed(stream[start:end]))
    assert got == messages


def test_replies_survive_the_way_back() -> None:
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    assert list(decoder.feed(b"".join(map(encode_frame, FROM_RANK)))) == FROM_RANK


def test_one_byte_at_a_time() -> None:
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    stream = encode_frame(FROM_RANK[2])
    got = [message for byte in stream for message in decoder.feed(bytes([byte]))]
    assert got == [FROM_RANK[2]]


@given(st.binary(min_size=8, max_size=64))
def test_random_bytes_are_refused_in_words(garbage: bytes) -> None:
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    if garbage.startswith(b"HDL"):
        return
    with pytest.raises(HeddleError, match="a frame begins with"):
        list(decoder.feed(garbage))


@given(st.binary(max_size=64))
def test_random_bodies_are_refused_in_words(body: bytes) -> None:
    frame = b"HDL" + bytes([VERSION]) + struct.pack("<I", len(body)) + body
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    with pytest.raises(HeddleError, match="no known message"):
        list(decoder.feed(frame))


def test_another_version_and_an_excessive_length_are_refused() -> None:
    good = encode_frame(Ready())
    other = good[:3] + bytes([VERSION + 1]) + good[4:]
    long = good[:4] + struct.pack("<I", 2**32 - 1) + good[8:]
    for frame in (other, long):
        decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
        with pytest.raises(HeddleError, match="a frame begins with"):
            list(decoder.feed(frame))


def test_the_sender_refuses_what_the_reader_would() -> None:
    message = TO_RANK[1]
    body_bytes = len(encode_frame(message)) - 8
    assert encode_frame(message, max_bytes=body_bytes)
    with pytest.raises(HeddleError, match=f"has {body_bytes} bytes; a frame holds at most 5"):
        encode_frame(message, max_bytes=5)


def test_a_message_for_the_other_direction_is_refused() -> None:
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    with pytest.raises(HeddleError, match="no known message"):
        list(decoder.feed(encode_frame(Stop())))


def test_a_channel_ends_with_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel: BlockingChannel[ToRank] = BlockingChannel(theirs, ToRank)
        ours.sendall(encode_frame(TO_RANK[1]) + encode_frame(Stop()) + encode_frame(Stop())[:5])
        ours.close()
        assert channel.receive() == TO_RANK[1]
        assert channel.receive() == Stop()
        with pytest.raises(EOFError):
            channel.receive()
