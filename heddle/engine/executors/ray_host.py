"""The Ray actor beside a rank process: it starts the process where Ray has placed the actor, and
watches it.

    driver                  actor, on the rank's node             rank process
    listens  <------------  three connections, each with a token
             channel  <----------------------------------------->  Start, steps, replies
             output   <------------------------------------------  stdout and stderr
             lifeline <-->  the process's pid, then its exit code

The rank is the same process that a launcher of one host starts (`rank_process`), with the channel
and the output as its descriptors. Ray carries three strings to the actor and asks it for stacks; no
step goes through Ray. The lifeline's end is the driver's death, and the actor's: either way the
rank ends. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress
from tempfile import TemporaryFile
from typing import Literal

import msgspec

from heddle.engine.executors.frames import encode_frame
from heddle.engine.executors.launcher import STATUS
from heddle.engine.executors.rank_process import STACKS_SIGNAL
from heddle.engine.executors.ranks import read_stacks
from heddle.engine.interpreter import interpreter_command
from heddle.faults.page import create_page

Role = Literal["channel", "output", "lifeline"]
ROLES: tuple[Role, ...] = ("channel", "output", "lifeline")
WELCOME = b"w"
"""The driver's answer to a `Hello` that it knows; memory that the ranks share comes along."""
_DIAL_SECONDS = 60.0
_KEEP_ALIVE = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A silent host is asked after 10 s, and given up 15 s later."""
_ORPHAN_SECONDS = 0.3
"""How long a rank may take to clean up behind a driver that is gone."""


class Hello(msgspec.Struct, frozen=True):
    """The first frame on every connection."""

    token: str
    rank: int
    role: Role
    rendezvous_port: int = 0
    """A free port of this host, where the other ranks could meet rank 0."""


class RankHost:
    """Starts one rank process and says how it ended."""

    def __init__(self, address: str, token: str, rank: int, directory: str) -> None:
        """Take the description; nothing starts yet.

        Args:
            address: where the driver listens: a path, or `host:port`.
            token: proves that a connection is this actor's.
            rank: global rank.
            directory: the driver's working directory, used where it exists.
        """
        self._address, self._token, self._rank = address, token, rank
        self._directory = directory if os.path.isdir(directory) else None
        # Open as long as this object: a rank that wrote its stacks may end before they are read.
        self._stacks = TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start the process, and wait for its end.

        Returns:
            Its exit code; negative for a signal.
        Raises:
            OSError: the driver cannot be reached, or does not know us.
        """
        with ExitStack() as stack:
            channel, segment = self._dial("channel")
            stack.enter_context(channel)
            output, _ = self._dial("output")
            stack.enter_context(output)
            lifeline, _ = self._dial("lifeline")
            stack.enter_context(lifeline)
            death_read, death_write = os.pipe()
            passed = [
                channel.fileno(),
                death_read,
                output.fileno(),
                self._stacks.fileno(),
                (page := create_page()),
                *segment,
            ]
            command = interpreter_command("heddle.engine.executors.rank_process", "run", *passed)
            # The thread that starts it must outlive it: the kernel ends a rank with its parent
            # thread. This one waits for it.
            process = self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                command, stdin=subprocess.DEVNULL, pass_fds=passed, cwd=self._directory
            )
            for descriptor in (death_read, page, *segment):
                os.close(descriptor)
            channel.close()  # or nobody would see the rank's end of it close
            output.close()
            lifeline.sendall(STATUS.pack(process.pid))
            threading.Thread(
                target=_end_with, args=(lifeline, death_write, process), daemon=True
            ).start()
            code = process.wait()
            with suppress(OSError):  # the driver may be gone
                lifeline.sendall(STATUS.pack(code))
                lifeline.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
            return code

    def stacks(self) -> str:
        """Stacks of all threads of the process; empty if it does not run, or does not react."""
        if self._process is None:
            return ""
        for number in (STACKS_SIGNAL, signal.SIGCONT):  # a stopped process must run to write them
            self._process.send_signal(number)
        (text,) = read_stacks([self._stacks.fileno()])
        return text

    def _dial(self, role: Role) -> tuple[socket.socket, list[int]]:
        """A connection that the driver has accepted, and descriptors that came along."""
        connection = _connect(self._address)
        try:
            port = free_port() if self._rank == 0 and role == "channel" else 0
            hello = Hello(token=self._token, rank=self._rank, role=role, rendezvous_port=port)
            connection.sendall(encode_frame(hello))
            if connection.family == socket.AF_UNIX:
                answer, passed, _, _ = socket.recv_fds(connection, 1, 1)
            else:
                answer, passed = connection.recv(1), []
            if answer != WELCOME:
                raise ConnectionError(f"the driver at {self._address} refused rank {self._rank}")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection, passed


def free_port() -> int:
    """A port of this host that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def keep_alive(connection: socket.socket) -> socket.socket:
    """Let a connection to another host end when that host is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _connect(address: str) -> socket.socket:
    if not address.startswith("/"):
        host, _, port = address.rpartition(":")
        return keep_alive(socket.create_connection((host, int(port)), _DIAL_SECONDS))
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_DIAL_SECONDS)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _end_with(lifeline: socket.socket, death: int, process: subprocess.Popen[bytes]) -> None:
    """Body of a thread: end the process when the driver lets go of the lifeline."""
    with suppress(OSError):
        lifeline.recv(1)
    os.close(death)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ORPHAN_SECONDS)
        return
    process.kill()
