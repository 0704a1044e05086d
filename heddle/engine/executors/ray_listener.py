"""Where a driver waits for the actors that Ray starts, and lets in those that know the token.

Ranks that all live on the driver's own node come through a unix socket in a private folder, and get
the memory that they will share with it; ranks of several nodes come over TCP to the driver's
address. Whoever else connects is turned away unheard. Nothing listens once all have come.
"""

from __future__ import annotations

import hmac
import os
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from heddle.engine.executors.frames import FrameDecoder
from heddle.engine.executors.ray_host import ROLES, WELCOME, Hello, Role, keep_alive
from heddle.errors import HeddleError, RankFailed

_MAX_HELLO_BYTES = 4096
_MAX_UNHEARD = 64
"""Connections that have said nothing yet; the oldest gives way to the next one."""
_GLANCE_SECONDS = 0.2
"""How often to ask Ray whether an actor has failed before it came."""


class RankListener:
    """A listener, until every rank has its connections."""

    def __init__(self, host: str | None, token: str) -> None:
        """Listen.

        Args:
            host: address of this host for other nodes; None: all ranks live on this one.
            token: what an actor must know.
        Raises:
            RankFailed: the address is not this host's.
        """
        self._token = token
        self._resources = ExitStack()
        self._selector = selectors.DefaultSelector()
        self._resources.callback(self._selector.close)
        self._decoders: dict[socket.socket, FrameDecoder[Hello]] = {}
        self.rendezvous_port = 0
        """As rank 0's actor has named it."""
        try:
            self._listener, self.address = self._listen(host)
        except OSError as error:
            self._resources.close()
            raise RankFailed(
                f"the driver cannot listen where ranks would look for it, {host or 'a file'}: "
                f"{error.strerror}"
            ) from error
        self._selector.register(self._listener, selectors.EVENT_READ)

    def admit_all(
        self, world_size: int, deadline: float, glance: Callable[[], object], segment: int | None
    ) -> dict[tuple[int, Role], socket.socket] | None:
        """Wait for the connections of all ranks.

        Args:
            world_size: number of ranks.
            deadline: monotonic time.
            glance: called now and then; raises when waiting has no sense any more.
            segment: descriptor of memory that goes to each rank with its channel.
        Returns:
            A connection for each rank and role; None: the deadline has passed.
        """
        admitted: dict[tuple[int, Role], socket.socket] = {}
        with ExitStack() as undo:
            undo.callback(_close_all, admitted)
            while len(admitted) < world_size * len(ROLES):
                if time.monotonic() >= deadline:
                    return None
                glance()
                for connection, hello in self._hear():
                    place = (hello.rank, hello.role)
                    if not 0 <= hello.rank < world_size or place in admitted:
                        connection.close()
                        continue
                    try:
                        _welcome(connection, segment if hello.role == "channel" else None)
                    except OSError:  # it has gone again; Ray says why at the next glance
                        connection.close()
                        continue
                    self.rendezvous_port = hello.rendezvous_port or self.rendezvous_port
                    admitted[place] = connection
            undo.pop_all()
        return admitted

    def close(self) -> None:
        """Listen no more; a second call does nothing."""
        for connection in self._decoders:
            connection.close()
        self._decoders.clear()
        self._resources.close()

    def _listen(self, host: str | None) -> tuple[socket.socket, str]:
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = self._resources.enter_context(socket.create_server((host, 0), family=family))
            address = f"{host}:{listener.getsockname()[1]}"
        else:
            folder = tempfile.mkdtemp(prefix="heddle-")  # of this user alone (0700)
            self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
            address = os.path.join(folder, "listener")
            listener = self._resources.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        listener.setblocking(False)
        return listener, address

    def _hear(self) -> list[tuple[socket.socket, Hello]]:
        """Those who have said something true, waiting a moment for somebody."""
        heard = []
        for key, _ in self._selector.select(_GLANCE_SECONDS):
            if key.fileobj is self._listener:
                if len(self._decoders) >= _MAX_UNHEARD:
                    self._turn_away(next(iter(self._decoders)))
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._decoders[connection] = FrameDecoder(Hello, _MAX_HELLO_BYTES)
                self._selector.register(connection, selectors.EVENT_READ)
                continue
            connection = key.fileobj  # type: ignore[assignment]
            if connection not in self._decoders:
                continue  # turned away in this round
            hello = self._read(connection)
            if isinstance(hello, Hello):
                heard.append((connection, hello))
            elif hello == "stranger":
                connection.close()
        return heard

    def _turn_away(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._decoders[connection]
        connection.close()

    def _read(self, connection: socket.socket) -> Hello | str:
        """A `Hello` with our token, or `more` is to come, or it is a `stranger`."""
        try:
            piece = connection.recv(_MAX_HELLO_BYTES)
            hello = next(self._decoders[connection].feed(piece), None) if piece else None
        except (OSError, HeddleError):
            piece, hello = b"", None
        if hello is None and piece:
            return "more"
        self._selector.unregister(connection)
        del self._decoders[connection]
        if hello is None or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "stranger"
        return hello


def _close_all(admitted: Mapping[tuple[int, Role], socket.socket]) -> None:
    for connection in admitted.values():
        connection.close()


def _welcome(connection: socket.socket, segment: int | None) -> None:
    """Let a rank's actor go on; from now on it, or its rank, writes."""
    if connection.family == socket.AF_UNIX:
        socket.send_fds(connection, [WELCOME], [] if segment is None else [segment])
    else:
        keep_alive(connection).send(WELCOME)
