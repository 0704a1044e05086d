"""Who is let in: those who know the token, each once."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from heddle.engine.executors import ray_listener
from heddle.engine.executors.frames import encode_frame
from heddle.engine.executors.ray_host import ROLES, WELCOME, Hello
from heddle.engine.executors.ray_listener import RankListener
from heddle.errors import RankFailed
from tests.support.processes import LONG_SECONDS, listening_addresses, nothing_left

TOKEN = "f" * 64


@pytest.fixture(params=[None, "127.0.0.1"], ids=["one node", "several"])
def listener(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RankListener]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with nothing_left():
        listener = RankListener(request.param, TOKEN)
        yield listener
        listener.close()
        listener.close()
    assert list(tmp_path.iterdir()) == []


def dial(listener: RankListener) -> socket.socket:
    if listener.address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(listener.address)
    else:
        host, _, port = listener.address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(LONG_SECONDS)
    return connection


def say(listener: RankListener, **fields: object) -> socket.socket:
    hello = {"token": TOKEN, "rank": 0, "role": "channel"} | fields
    connection = dial(listener)
    connection.sendall(encode_frame(Hello(**hello)))  # type: ignore[arg-type]
    return connection


def everybody(listener: RankListener, world_size: int) -> list[socket.socket]:
    return [
        say(listener, rank=rank, role=role, rendezvous_port=4000 + rank if role == "channel" else 0)
        for rank in range(world_size)
        for role in ROLES
    ]


def never() -> None:
    """There is nothing to see."""


def close_all(connections: object) -> None:
    for connection in connections:  # type: ignore[attr-defined]
        connection.close()


def test_all_come_in_with_their_roles_and_one_node_opens_no_port(listener: RankListener) -> None:
    segment = os.memfd_create("shared")
    os.write(segment, b"woven")
    is_unix = listener.address.startswith("/")
    assert listening_addresses([os.getpid()]) == ([] if is_unix else ["0100007F"])
    if is_unix:
        assert stat.S_IMODE(os.stat(os.path.dirname(listener.address)).st_mode) == 0o700
    callers = everybody(listener, 1)
    admitted = listener.admit_all(1, time.monotonic() + LONG_SECONDS, never, segment)
    assert admitted is not None
    assert set(admitted) == {(0, role) for role in ROLES}
    assert listener.rendezvous_port == 4000
    for caller, role in zip(callers, ROLES, strict=True):
        if is_unix:
            answer, passed, _, _ = socket.recv_fds(caller, 1, 1)
            assert len(passed) == (role == "channel")
            for descriptor in passed:
                assert os.pread(descriptor, 9, 0) == b"woven"
                os.close(descriptor)
        else:
            answer = caller.recv(1)
        assert answer == WELCOME
        admitted[0, role].send(role.encode())
        assert caller.recv(20) == role.encode()
    os.close(segment)
    close_all([*callers, *admitted.values()])


STRANGERS: dict[str, Callable[[RankListener], socket.socket]] = {
    "another token": lambda listener: say(listener, token="0" * 64),
    "no token": lambda listener: say(listener, token=""),
    "no such rank": lambda listener: say(listener, rank=2),
    "a rank below all": lambda listener: say(listener, rank=-1),
    "a request": lambda listener: _send(listener, b"GET / HTTP/1.1\r\n\r\n"),
    "too long": lambda listener: _send(listener, b"HDL\x01" + b"\xff" * 4),
    "no such role": lambda listener: say(listener, role="wizard"),
}


def _send(listener: RankListener, words: bytes) -> socket.socket:
    connection = dial(listener)
    connection.sendall(words)
    return connection


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_turned_away_and_hold_up_nobody(
    listener: RankListener, stranger: Callable[[RankListener], socket.socket]
) -> None:
    silent, refused = dial(listener), stranger(listener)
    callers = everybody(listener, 2)
    admitted = listener.admit_all(2, time.monotonic() + LONG_SECONDS, never, None)
    assert admitted is not None
    assert len(admitted) == 6
    with suppress(ConnectionResetError):  # what it had said was not even read
        assert refused.recv(1) == b""
    close_all([silent, refused, *callers, *admitted.values()])


def test_many_who_say_nothing_hold_up_nobody(listener: RankListener) -> None:
    silent = []
    callers: list[socket.socket] = []

    def crowd() -> None:
        """At each look round, until there were more than are kept."""
        if len(silent) < 80:
            silent.extend(dial(listener) for _ in range(8))
        elif not callers:
            callers.extend(everybody(listener, 1))

    admitted = listener.admit_all(1, time.monotonic() + LONG_SECONDS, crowd, None)
    assert admitted is not None
    assert silent[0].recv(1) == b""
    close_all([*silent, *callers, *admitted.values()])


def test_who_has_gone_before_the_welcome_is_not_let_in(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcome, refused = ray_listener._welcome, []

    def fail_first(connection: socket.socket, segment: int | None) -> None:
        if not refused:
            refused.append(connection)
            raise BrokenPipeError
        welcome(connection, segment)

    monkeypatch.setattr(ray_listener, "_welcome", fail_first)
    callers = [*everybody(listener, 1), *everybody(listener, 1)]
    admitted = listener.admit_all(1, time.monotonic() + LONG_SECONDS, never, None)
    assert admitted is not None
    assert refused[0] not in admitted.values()
    close_all([*callers, *admitted.values()])


def test_a_rank_comes_in_once(listener: RankListener) -> None:
    first, second = say(listener), say(listener)
    callers = [say(listener, role=role) for role in ROLES[1:]]
    admitted = listener.admit_all(1, time.monotonic() + LONG_SECONDS, never, None)
    assert admitted is not None
    assert sorted([first.recv(1), second.recv(1)]) == [b"", WELCOME]
    close_all([first, second, *callers, *admitted.values()])


def test_a_hello_may_come_in_pieces(listener: RankListener) -> None:
    frame = encode_frame(Hello(token=TOKEN, rank=0, role="channel"))
    slow = _send(listener, frame[:9])
    callers = [say(listener, role=role) for role in ROLES[1:]]
    threading.Timer(0.1, lambda: slow.sendall(frame[9:])).start()
    admitted = listener.admit_all(1, time.monotonic() + LONG_SECONDS, never, None)
    assert admitted is not None
    assert slow.recv(1) == WELCOME
    close_all([slow, *callers, *admitted.values()])


def test_waiting_ends_by_its_deadline_or_when_it_has_no_sense(listener: RankListener) -> None:
    callers = everybody(listener, 1)
    assert listener.admit_all(2, time.monotonic() + 0.5, never, None) is None
    assert [caller.recv(2) for caller in callers] == [WELCOME] * 3
    assert callers[0].recv(1) == b""  # and those who had come are let go

    def give_up() -> None:
        raise ValueError("its actor is gone")

    with pytest.raises(ValueError, match="its actor is gone"):
        listener.admit_all(2, time.monotonic() + LONG_SECONDS, give_up, None)
    close_all(callers)


def test_an_address_of_another_host_is_refused_in_words() -> None:
    with nothing_left(), pytest.raises(RankFailed, match=r"cannot listen .*, 192\.0\.2\.77: "):
        RankListener("192.0.2.77", TOKEN)
