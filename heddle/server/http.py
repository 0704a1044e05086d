"""uvicorn, with what a public port needs beside it.

h11 alone stops runaway headers, but nothing stops a head that never ends: each must be complete
within `HEAD_SECONDS`, the first of a connection and every later one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from heddle.errors import ConfigError

HEAD_SECONDS = 20.0
"""In which the head of a request must have come."""
KEEP_ALIVE_SECONDS = 75
"""An idle connection stays open; longer than clients and proxies keep theirs."""


class HttpProtocol(H11Protocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a head."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the wait for a head ends with a head."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """The connection is idle now; whatever comes next begins a head."""
        super().on_response_complete()
        self._stop_watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing will come."""
        self._stop_watch()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
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


class HttpServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def http_server(app: Any, *, max_connections: int, keyfile: str, certfile: str) -> HttpServer:
    """A server of one application.

    Args:
        app: ASGI.
        max_connections: at once; further ones are refused by uvicorn in plain text.
        keyfile: of the certificate; empty: plain HTTP.
        certfile: PEM.
    Raises:
        ConfigError: the certificate or its key cannot be read.
    """
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections,
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
