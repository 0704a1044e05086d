"""The driver's side of ranks, against ranks that the test plays itself."""

from __future__ import annotations

import os
import selectors
import socket
import time
from typing import Any, cast

from heddle.engine.executors.frames import encode_frame
from heddle.engine.executors.launcher import STATUS, RankDescriptors, RankHandle, RankLauncher
from heddle.engine.executors.messages import Failed, Progress, Ready
from heddle.engine.executors.ranks import Ended, RankProcesses
from tests.support.processes import LONG_SECONDS, nothing_left


class PlayedRank:
    """The other end of one rank's descriptors."""

    def __init__(self, descriptors: RankDescriptors, status: int) -> None:
        self.channel = socket.socket(fileno=os.dup(descriptors.channel))
        self.status = status
        os.write(status, STATUS.pack(2**22 + 1))  # no process has this pid

    def end(self, code: int) -> None:
        os.write(self.status, STATUS.pack(code))
        os.close(self.status)


class PlayedLauncher:
    """Starts nothing."""

    def __init__(self) -> None:
        self.ranks: list[PlayedRank] = []

    def launch(self, descriptors: RankDescriptors) -> RankHandle:
        read_end, write_end = os.pipe()
        self.ranks.append(PlayedRank(descriptors, write_end))
        return RankHandle(read_end)


def launched(num_ranks: int) -> tuple[RankProcesses, list[PlayedRank]]:
    launcher = PlayedLauncher()
    labels = [f"rank{rank}" for rank in range(num_ranks)]
    ranks = RankProcesses(labels, cast(RankLauncher, launcher), owns_launcher=False)
    ranks.launch(time.monotonic() + LONG_SECONDS)
    return ranks, launcher.ranks


def events_of(ranks: RankProcesses) -> list[tuple[int, Any]]:
    return list(ranks.poll(0.2))


def test_what_a_rank_said_before_its_end_comes_before_its_end() -> None:
    with nothing_left():
        ranks, (zero, one) = launched(2)
        last = Failed("ValueError: boom", "RankFailed", "", False, False)
        # The end becomes readable first.
        one.end(-9)
        one.channel.sendall(encode_frame(Ready()) + encode_frame(last))
        one.channel.close()
        assert events_of(ranks) == [(1, Ready()), (1, last), (1, Ended(-9))]
        zero.channel.close()
        zero.end(0)
        assert events_of(ranks) == [(0, Ended(0))]
        assert events_of(ranks) == []
        ranks.close()


def test_half_a_message_waits_for_its_other_half() -> None:
    ranks, (rank,) = launched(1)
    frame = encode_frame(Progress(1, 2))
    rank.channel.sendall(frame[:11])
    assert events_of(ranks) == []
    rank.channel.sendall(frame[11:])
    assert events_of(ranks) == [(0, Progress(1, 2))]
    rank.end(0)
    rank.channel.close()
    ranks.close()


def test_a_damaged_stream_reads_as_a_failure_of_that_rank() -> None:
    ranks, (zero, one) = launched(2)
    one.channel.sendall(b"GET / HTTP/1.1\r\n\r\n")
    zero.channel.sendall(encode_frame(Ready()))
    events = sorted(events_of(ranks), key=lambda event: event[0])
    assert events[0] == (0, Ready())
    assert events[1][0] == 1
    assert "a frame begins with" in events[1][1].text
    for rank in (zero, one):
        rank.channel.close()
        rank.end(0)
    ranks.close()


class Silent:
    """A channel whose other host has not answered for too long."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def recv(self, _size: int) -> bytes:
        raise TimeoutError("keepalive")


def test_a_channel_whose_host_is_silent_reads_as_closed() -> None:
    ranks, (rank,) = launched(1)
    rank.channel.send(b"x")
    (state,) = ranks._ranks
    silent = Silent(state.channel)
    ranks._selector.unregister(state.channel)
    ranks._selector.register(silent, selectors.EVENT_READ, (state, False))
    state.channel = silent  # type: ignore[assignment]
    assert list(ranks.poll(LONG_SECONDS)) == []
    assert silent not in ranks._selector.get_map()
    rank.channel.close()
    rank.end(0)
    ranks.close()


def test_a_frame_that_does_not_fit_goes_out_piece_by_piece() -> None:
    ranks, (rank,) = launched(1)
    frame = os.urandom(5_000_000)
    ranks.send(0, frame)  # returns although nobody reads
    ranks.send(0, b"next")
    got = b""
    while len(got) < len(frame) + 4:
        list(ranks.poll(0.0))
        got += rank.channel.recv(1 << 20)
    assert got == frame + b"next"
    rank.channel.close()
    rank.end(0)
    ranks.close()
