"""uvicorn, with what a public port needs beside it.

h11 alone stops runaway headers, but nothing stops a head that never ends: each must be complete
within `HEAD_SECONDS`, the first of a connection and every later one. Nor does a close get rid of a
reader that takes nothing: what was written waits for it. Such a connection is cut.

Connections have a number. Beyond it the one gives way that has been idle for longest, or waits for
the rest of a head: whoever opens many and says nothing keeps nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from heddle.errors import ConfigError

HEAD_SECONDS = 20.0
"""In which the head of a request must have come."""
SPARE_CONNECTIONS = 16
"""Beside those of requests: health, readiness and metrics are asked for over them."""
KEEP_ALIVE_SECONDS = 75
"""An idle connection stays open; longer than clients and proxies keep theirs."""


@dataclass(eq=False)
class ConnectionLimits:
    """Of all connections of one server."""

    max_connections: int = 0
    """0: any number."""
    stall_seconds: float = 0.0
    """In which a reader takes at least a byte; 0: any time."""
    idle: dict[HttpProtocol, None] = field(default_factory=dict)
    """Connections without a request, since when they are: the first one for longest."""


class HttpProtocol(H11Protocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(
        self, *arguments: Any, limits: ConnectionLimits | None = None, **more: Any
    ) -> None:
        """As uvicorn's.

        Args:
            arguments: of uvicorn.
            limits: of all connections of a server; None: none.
            more: of uvicorn.
        """
        super().__init__(*arguments, **more)
        self._limits = limits or ConnectionLimits()
        self._stall_seconds = self._limits.stall_seconds

    def connection_made(self, transport: Any) -> None:
        """Wait for a head; one that waits for longer may have to go."""
        super().connection_made(transport)
        self._watch_head()
        idle, most = self._limits.idle, self._limits.max_connections
        idle[self] = None
        if most and len(self.connections) > most:
            next(iter(idle)).give_way()

    def give_way(self) -> None:
        """Close, for somebody else to have the place."""
        self._limits.idle.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the wait for a head ends with a head."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """The connection is idle now; whatever comes next begins a head."""
        super().on_response_complete()
        self._stop_watch()
        is_busy = self.cycle is not None and not self.cycle.response_complete  # the next one waited
        if not (is_busy or self.transport.is_closing()):
            self._limits.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing will come."""
        self._limits.idle.pop(self, None)
        self._stop_watch()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The reader is behind."""
        super().pause_writing()
        self._end_stall()
        if self._stall_seconds:
            self._watch_reader()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._end_stall()
        super().resume_writing()

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._limits.idle.pop(self, None)
            self._stop_watch()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_watch(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _watch_reader(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._stall_seconds, self._cut_if_stalled, unsent)

    def _cut_if_stalled(self, unsent_before: int) -> None:
        self._stall_timer = None
        if self.transport.get_write_buffer_size() < unsent_before:
            self._watch_reader()
        else:
            self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class HttpServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def http_server(
    app: Any,
    *,
    keyfile: str,
    certfile: str,
    stall_seconds: float = 0.0,
    max_connections: int = 0,
) -> HttpServer:
    """A server of one application.

    Args:
        app: ASGI.
        keyfile: of the certificate; empty: plain HTTP.
        certfile: PEM.
        stall_seconds: after which a connection is cut whose reader takes nothing; 0: never.
        max_connections: at once; 0: any number.
    Raises:
        ConfigError: the certificate or its key cannot be read.
    """
    limits = ConnectionLimits(max_connections, stall_seconds)
    config = uvicorn.Config(
        app,
        http=cast(Any, partial(HttpProtocol, limits=limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=1 << 16,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        ssl_keyfile=keyfile or None,
        ssl_certfile=certfile or None,
    )
    try:
        config.load()  # here, not behind the door: nothing was loaded yet
    except OSError as error:  # that of TLS is one
        raise ConfigError(f"the certificate {certfile} with the key {keyfile}: {error}") from error
    return HttpServer(config)
